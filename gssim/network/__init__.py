"""The network: routes over the wiring, shares of links, equal links and flows taken together, and flows in time."""

from gssim.network.fluid import Network, Pace
from gssim.network.folding import Folded, Traffic, codes, fold
from gssim.network.queues import notices_queue
from gssim.network.routes import Router
from gssim.network.sharing import max_min_rates

__all__ = ["Folded", "Network", "Pace", "Router", "Traffic", "codes", "fold", "max_min_rates", "notices_queue"]
