"""Life cycle of a rank process: joining the process group, reporting failures to the launcher, and exiting."""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from gsreal.run.progress import REPORTS, install_stack_dump, note_progress
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import write_text
from gssim.execution.parent import die_with_parent

LAUNCHER = "GSREAL_LAUNCHER"
"""Environment variable with the process id of the launching command line."""
STORE = "GSREAL_STORE"
"""Environment variable with the file through which ranks of this launcher find each other."""
TIMEOUT = "GSREAL_TIMEOUT_S"
"""Environment variable with the launcher's timeout."""
LATER_S = 60.0
"""Margin of a collective's timeout over the launcher's, which can name the rank that blocks the others."""
INIT = "1"
"""The process that adopts those whose parent has died."""


def run_on_rank(main: Callable[..., None], arguments: Sequence[str]) -> NoReturn:
    """Call `main` with the command line's arguments, then end this process; failures are reported to the launcher.

    The interpreter is not torn down: a gloo thread that releases its last tensor meanwhile aborts the process, although
    all of its work is done (pytorch/pytorch#179291).
    """
    die_with_parent()  # before anything that takes time: a launcher may be killed while ranks still import torch
    if str(os.getppid()) == INIT != os.environ.get(LAUNCHER, INIT):
        os._exit(1)  # the launcher died before this process could ask to die with it
    try:
        install_stack_dump()
        main(*arguments)
        leave()
        code = 0
    except BaseException as error:  # torch.distributed.checkpoint's exceptions are no Exception
        note_failure(error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(backend: str) -> None:
    """Create the process group of all ranks.

    Ranks of our launcher find each other by a file, others through torchrun. torchrun's static rendezvous keeps one
    store for all attempts: restarted ranks would find the addresses of ended ones there (torch 2.13,
    distributed/rendezvous.py, _create_c10d_store).
    """
    timeout = timedelta(seconds=float(os.environ[TIMEOUT])) if TIMEOUT in os.environ else None
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if STORE in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = FileStore(os.environ[STORE], ranks)
        later = timeout and timeout + timedelta(seconds=LATER_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=later)
    elif not attempt:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            started = f"{os.environ.get('WORLD_SIZE')} ranks have not met at {place}"
            raise RunFailedError(f"{started} within {os.environ.get(TIMEOUT, '?')} s: {error}") from None
    else:
        from torch.distributed.rendezvous import rendezvous

        shared_store, rank, ranks = next(iter(rendezvous("env://")))
        prefixed = PrefixStore(f"attempt-{attempt}", shared_store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=timeout)
    note_progress("it has joined the others")


def leave() -> None:
    """Leave the process group, if this rank is in one.

    Wrappers and the group refer to each other, so that gloo's threads live until both are garbage-collected.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_json(value: Any) -> list[Any]:
    """Return each rank's value, by rank: plain data, as from JSON (a collective).

    torch's own `all_gather_object` unpickles the received data, which may run code.
    """
    is_nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    most = max(int(size) for size in sizes)
    parts = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(parts, torch.cat([own, own.new_zeros(most - len(own))]))
    texts = [bytes(part[: int(size)].cpu().numpy()) for part, size in zip(parts, sizes, strict=True)]
    return [json.loads(text) for text in texts]


def note_failure(error: BaseException) -> None:
    """Write the reason of this rank's failure to the launcher's report folder."""
    folder = os.environ.get(REPORTS)
    if folder:
        kind = "user" if isinstance(error, UserError) else "bug"
        is_told = isinstance(error, (UserError, RunFailedError))
        message = str(error) if is_told else f"{type(error).__name__}: {error}"
        report = {"rank": int(os.environ.get("RANK", "0")), "kind": kind, "message": message}
        report["traceback"] = traceback.format_exc()
        write_text(Path(folder, f"rank-{report['rank']}.json"), json.dumps(report))
