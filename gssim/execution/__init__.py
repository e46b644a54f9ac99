"""Executors of independent work (inline, processes, Dask), stores of finished work, caches, and fingerprints."""

from gssim.execution.executor import (
    Alone,
    Workers,
    checked_jobs,
    dask_workers,
    processes,
    processes_with,
    start_fork_server,
    worker_state,
)
from gssim.execution.store import (
    NUMERICS,
    SHOWN,
    FileStore,
    RecordStore,
    code_digest,
    installed_version,
    package_digest,
)
