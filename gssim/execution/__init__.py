"""Execution: an executor of independent work (inline, processes or Dask), and fingerprints of the code that did it."""

from gssim.execution.executor import Alone, Workers, dask_workers, processes, usable_cores
from gssim.execution.fingerprint import NUMERICS, SHOWN, code_digest, installed_version, package_digest

__all__ = [
    "NUMERICS",
    "SHOWN",
    "Alone",
    "Workers",
    "code_digest",
    "dask_workers",
    "installed_version",
    "package_digest",
    "processes",
    "usable_cores",
]
