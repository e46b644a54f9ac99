"""Predicts memory and step time of sharding plans on unequal clusters.

The public names are loaded when they are first used: `import gssim` itself loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gssim.api import load, search, simulate, sweep
    from gssim.errors import RunFailedError, UserError
    from gssim.result import Result
    from gssim.scenario import Scenario

    __version__: str

__all__ = ["Result", "RunFailedError", "Scenario", "UserError", "load", "search", "simulate", "sweep"]

_MODULES = {"Result": "result", "Scenario": "scenario", "UserError": "errors", "RunFailedError": "errors"}


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that defines it, or `__version__`: that of the installed package."""
    if name == "__version__":
        return import_module("importlib.metadata").version("gssim")
    if name not in __all__:
        raise AttributeError(f"module 'gssim' has no attribute '{name}'")
    return getattr(import_module(f"gssim.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__")), "__version__"])
