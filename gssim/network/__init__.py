"""The network: routes over the wiring, shares of links, equal links and flows taken together, and flows in time."""

from gssim.network.fluid import Network
from gssim.network.folding import Folded, Traffic, codes, fold
from gssim.network.routes import Router
from gssim.network.sharing import max_min_rates

__all__ = ["Folded", "Network", "Router", "Traffic", "codes", "fold", "max_min_rates"]
