"""Other programs' files: importers of training configurations and clusters, and exporters."""

from gssim.interop.models import ModelFile, find_model
from gssim.interop.scenario_file import FORMATS, Imported, RefusedError, import_scenario

__all__ = ["FORMATS", "Imported", "ModelFile", "RefusedError", "find_model", "import_scenario"]
