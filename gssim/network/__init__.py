"""The network: routes, max-min fair flows in simulated time, and folding of equal links and flows."""

from gssim.network.clock import Clock
from gssim.network.fluid import Network, Pace, limited_rates
from gssim.network.folding import codes
from gssim.network.routes import Router, queued_ratio
from gssim.network.transfers import JointSessions, Prepared
