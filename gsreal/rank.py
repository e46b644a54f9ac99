"""A rank of a real run: how it joins the others, how it says why it failed, and how it ends."""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from gsreal.machine import die_with_parent
from gssim.units import UserError

LAUNCHER = "GSREAL_LAUNCHER"
"""Environment variable in which a rank finds the process id of the command line that wants it."""
INIT = "1"
"""The process to which those fall whose parent has died."""


def run_on_rank(main: Callable[..., None], arguments: Sequence[str]) -> NoReturn:
    """Call `main` with the command line's arguments, then end this process; the launcher hears of what fails.

    The interpreter is not torn down. A thread of gloo's that lets go of its last tensor while that happens aborts the
    process, although all of its work is done (pytorch/pytorch#179291).
    """
    die_with_parent()  # before anything that takes time: a launcher may be killed while ranks still import torch
    if str(os.getppid()) == INIT != os.environ.get(LAUNCHER, INIT):
        os._exit(1)  # it was, before this process could ask to die with it
    try:
        main(*arguments)
        leave()
        code = 0
    except Exception as error:
        note_failure(error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(backend: str) -> None:
    """Make the process group of all ranks.

    torchrun's static rendezvous keeps one store for all attempts: ranks that are started again would find there where
    those listened that are gone (torch 2.13, distributed/rendezvous.py, _create_c10d_store).
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt:
        dist.init_process_group(backend)
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(iter(rendezvous("env://")))
    dist.init_process_group(backend, store=PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=ranks)


def leave() -> None:
    """Leave the process group, if this rank is in one.

    Wrappers and the group refer to each other: until they are collected, gloo's threads live on.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def note_failure(error: Exception) -> None:
    """Write why this rank failed to where the launcher looks."""
    folder = os.environ.get("GSREAL_REPORTS")
    if folder:
        kind = "user" if isinstance(error, UserError) else "bug"
        message = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
        report = {"rank": int(os.environ.get("RANK", "0")), "kind": kind, "message": message}
        report["traceback"] = traceback.format_exc()
        Path(folder, f"rank-{report['rank']}.json").write_text(json.dumps(report), encoding="utf-8")
