"""Other programs' files: importers of training configurations and clusters, and exporters."""

from gssim.interop.export import EXPORTS, Exported, export_scenario
from gssim.interop.models import ModelFile, find_model
from gssim.interop.scenario_file import FORMATS, Imported, RefusedError, import_scenario

__all__ = [
    "EXPORTS",
    "FORMATS",
    "Exported",
    "Imported",
    "ModelFile",
    "RefusedError",
    "export_scenario",
    "find_model",
    "import_scenario",
]
