"""Other programs' files: importers of training configurations and clusters, and exporters."""

from gssim.interop.cluster_file import MadeCluster, cluster_of, usual_cluster
from gssim.interop.export import EXPORTS, Exported, export_scenario
from gssim.interop.models import ModelFile, find_model
from gssim.interop.scenario_file import FORMATS, Imported, RefusedError, import_scenario
from gssim.interop.servers import SERVERS, server_of

__all__ = [
    "EXPORTS",
    "FORMATS",
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
    "usual_cluster",
]
