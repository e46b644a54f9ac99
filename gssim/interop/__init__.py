"""Other programs' files: importers of training configurations and clusters, and exporters.

Names are loaded on first use, so that commands that read no such file do not wait for the importers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gssim.interop.cluster_file import MadeCluster, cluster_of, usual_cluster
    from gssim.interop.export import EXPORTS, Exported, export_scenario
    from gssim.interop.formats import FORMATS, PROGRAMS
    from gssim.interop.models import ModelFile, find_model
    from gssim.interop.reading import standard_input
    from gssim.interop.scenario_file import Imported, RefusedError, import_scenario
    from gssim.interop.servers import SERVERS, server_of

__all__ = [
    "EXPORTS",
    "FORMATS",
    "PROGRAMS",
    "SERVERS",
    "Exported",
    "Imported",
    "MadeCluster",
    "ModelFile",
    "RefusedError",
    "cluster_of",
    "export_scenario",
    "find_model",
    "import_scenario",
    "server_of",
    "standard_input",
    "usual_cluster",
]

_MODULES = {
    **dict.fromkeys(("MadeCluster", "cluster_of", "usual_cluster"), "cluster_file"),
    **dict.fromkeys(("EXPORTS", "Exported", "export_scenario"), "export"),
    **dict.fromkeys(("FORMATS", "PROGRAMS"), "formats"),
    **dict.fromkeys(("ModelFile", "find_model"), "models"),
    "standard_input": "reading",
    **dict.fromkeys(("Imported", "RefusedError", "import_scenario"), "scenario_file"),
    **dict.fromkeys(("SERVERS", "server_of"), "servers"),
}


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module 'gssim.interop' has no attribute '{name}'")
    return getattr(import_module(f"gssim.interop.{_MODULES[name]}"), name)
