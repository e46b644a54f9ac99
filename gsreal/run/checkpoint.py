"""Checkpoints of a training with torch.distributed.checkpoint, resumable by any number of ranks.

A checkpoint is a folder `step-N`. It is written under another name and renamed once every rank has written its part, so
that leftovers of a killed rank are never loaded. If the files of a checkpoint do not match their digests, the one
before it is used. One run at a time saves in a folder: it holds the folder's lock. Parameters and optimizer state are
saved by parameter name and element. So a training can resume with another number of ranks, other shares, another
partition of the model (by layers or inside blocks) and, with Gradient Sharding, other buckets: each rank reads the
elements it needs. Data are a function of seed and step.

A dynamic factor on the loss goes on as it was. Rank-specific state is restored if there are as many ranks as before,
with the same shares: torch's random states (of dropout), and the residuals and threshold estimates of a push. Otherwise
random states are seeded from seed, step and rank, and residuals are dropped: each element loses less than the
threshold, once. Shares that follow the rank speeds are restored too, if there are as many ranks; speeds are measured
anew. What a publication with a threshold has held back is not saved: all ranks resume with the owners' values, so that
losses differ a little from those of a run that was never interrupted.

Checkpoints are read without running code, although a pickle may name any function to call. torch's own reader unpickles
`.metadata` and each non-tensor value without restrictions (torch 2.13, checkpoint/filesystem.py and
default_planner.py). Here `.metadata` may name only classes that describe a checkpoint, and the other values only those
that `torch.load(weights_only=True)` accepts.

A pipeline rank has some of the model's parameters, a tensor-parallel rank slices of them, and a rank of a sharded
optimizer the state of some. All are saved under the parameter's name in the whole model, at the indices that their
elements have there.
"""

import hashlib
import io
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding import GradientSharding
from gsreal.gradient_sharding.master import MasterCopy
from gsreal.gradient_sharding.state import MASTER, PartialTensor, initialise
from gsreal.methods.pipelined import StageModules
from gsreal.methods.tensor_slices import Slice
from gsreal.methods.training import Training
from gsreal.run.progress import note_progress
from gsreal.run.rank import gather_json
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import sync_folder, write_text
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.scenario import Scenario, has_master_copy, tied_parameters
from gssim.units import validated
from gssim.workload import unrolled


class Elements:
    """A module and its optimizer's state, without options: dcp.save({"training": Elements(module, optimizer)}).

    dcp.load takes the same, and loads into the tensors themselves.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return views of this rank's tensors: `model` by name, `optimizer` by name and key of state."""
        states = dict(_states(self.optimizer))
        model: dict[str, Tensor] = {}
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, value, part in _named(self.module):
            model[name] = _placed(value, part)
            state = states.get(value, {})
            if state:
                optimizer[name] = {
                    key: _placed(each, part if each.shape == value.shape else None) for key, each in state.items()
                }
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: values are loaded in place."""


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor, Slice | None]]:
    """Give (name in the model, tensor, slice or None) of all tensors of a module."""
    if isinstance(module, StageModules):
        for stage in module.stages:
            yield from _named(stage)
        return
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield from _named(module.module)
        return
    tensors = module.state_dict(keep_vars=True)  # called first: FSDP2 puts its shards in place for it
    parts = {
        getattr(each, leaf): part
        for each in module.modules()
        for leaf, (part, _) in each.__dict__.get("_gsreal_slices", {}).items()
    }
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            yield name, value, parts.get(value)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Give every parameter updated on this rank with the tensors of its state, including its master copy."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    if isinstance(inner, MasterCopy):
        initialise(inner.inner)
        for parameter, master in inner.pairs():
            yield parameter, {MASTER: master.detach(), **_tensors(inner.inner.state[master])}
        return
    initialise(inner)
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield parameter, _tensors(inner.state[parameter])


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _placed(value: Tensor, part: Slice | None) -> Tensor:
    """Return a view of a tensor, or of a slice with its position in the whole."""
    value = value.detach()
    if part is None:
        return value
    whole = [part.size if i == part.dimension else size for i, size in enumerate(value.shape)]
    local = value.to_local() if isinstance(value, DTensor) else value
    return PartialTensor(_pieces(local, part, _first_row(value, part)), whole)


def _pieces(local: Tensor, part: Slice, first_row: int) -> dict[tuple[int, ...], Tensor]:
    """Return the local pieces of a slice, its rows from `first_row` on, by their index in the whole tensor."""
    pieces: dict[tuple[int, ...], Tensor] = {}
    along_rows = part.dimension == 0
    extent = range(first_row, first_row + local.shape[0]) if along_rows else range(local.shape[part.dimension])
    start = 0
    for first, last in part.ranges:
        stop = start + last - first
        low, high = max(start, extent.start), max(start, extent.start, min(stop, extent.stop))
        where = [0 if along_rows else first_row, *[0] * (local.dim() - 1)]
        where[part.dimension] = first + low - start
        if high > low or not pieces:
            pieces[tuple(where)] = local.narrow(part.dimension, min(low, extent.stop) - extent.start, high - low)
        start = stop
    return pieces


def _first_row(value: Tensor, part: Slice) -> int:
    """Return the first row of a tensor's local part in its slice: FSDP2 shards rows in chunks, as `torch.chunk`."""
    names = value.device_mesh.mesh_dim_names or () if isinstance(value, DTensor) else ()
    if "dp_shard" not in names:
        return 0
    assert isinstance(value, DTensor)
    rows = sum(last - first for first, last in part.ranges) if part.dimension == 0 else value.shape[0]
    chunk = -(-rows // value.device_mesh["dp_shard"].size())
    return min(rows, value.device_mesh.get_local_rank("dp_shard") * chunk)


NAMES = frozenset(
    [("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
    + [(module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")]
    + [("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")]
    + [
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ]
)
"""Classes and functions that a checkpoint's metadata may name, in addition to torch's data types."""


class _ForbiddenNameError(Exception):
    """A pickle names a class or function that is not allowed in a checkpoint's metadata."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the named class or function, if it only holds data."""
        if (module, name) in NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise _ForbiddenNameError(f"names {module}.{name}, which is no part of a checkpoint; it was not run")


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder; raises UserError immediately if its metadata are invalid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = folder / METADATA
        try:
            with file.open("rb") as stream:
                self._metadata = _Unpickler(stream).load()
        except _ForbiddenNameError as error:
            raise UserError(f"{file}: {error}") from None
        except Exception as error:  # a damaged pickle raises anything
            raise UserError(f"{file}: does not describe a checkpoint: {type(error).__name__}: {error}") from None
        if not isinstance(self._metadata, Metadata):
            raise UserError(f"{file}: does not describe a checkpoint, but is a {type(self._metadata).__name__}")

    def read_metadata(self, *_args: Any, **_settings: Any) -> Metadata:
        """Return the metadata of the checkpoint."""
        described = getattr(self._metadata, "storage_meta", None) or StorageMeta()
        described.load_id = self.load_id
        self._metadata.storage_meta = described
        return self._metadata


class Planner(DefaultLoadPlanner):
    """torch's load planner, restricted to plain values and tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


KEPT = 2
"""Checkpoints that are kept: the last two."""
PROGRESS = "progress.json"
METADATA = ".metadata"
LOCK = ".gsreal-checkpoint.lock"
"""Lock file of a checkpoint folder, held by the run that saves there, and by its ranks."""
FORMAT = 4
OURS = re.compile(r"rank-\d+\.pt|__\d+_\d+\.distcp|progress\.json|\.gssim-\w+\.partial|\.metadata(\.tmp)?")
"""Names of all files of a checkpoint; no other files are removed from its folder."""
UNFINISHED = re.compile(r"step-\d{8}(\.replaced)?\.partial")


@dataclass(frozen=True)
class Progress:
    """Progress of a training at a checkpoint."""

    step: int = 0
    """Completed steps, including warm-up."""
    losses: tuple[float, ...] = ()
    """Losses of the steps after the warm-up."""
    ranks: int = 0
    """Number of ranks that wrote the checkpoint."""
    training: dict[str, Any] = field(default_factory=dict)
    """Identity of the training, see `identity`."""
    samples: tuple[int, ...] = ()
    """Samples of each rank in the next step, if shares follow the rank speeds."""
    shard_shares: tuple[float, ...] = ()
    """Share of the parameters of each rank, in the same case."""
    files: dict[str, str] = field(default_factory=dict)
    """Digest (SHA-256) of each of its other files."""
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoints:
    """Folder of a training's checkpoints, and the number of steps between them."""

    folder: Path
    every: int

    def is_due(self, step: int, total: int) -> bool:
        """Return whether to save after `step` steps of `total`."""
        return step % self.every == 0 or step == total

    def resume(self, scenario: Scenario, training: Training) -> Progress:
        """Load the last checkpoint into the training, if there is one; return its progress (a collective).

        A checkpoint of the final step is skipped: ranks restarted after it must still measure.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        rank, total = dist.get_rank(), scenario.run.warmup_steps + scenario.run.steps
        last: tuple[Path, Progress] | None = None
        if rank == 0:
            remove_leftovers(self.folder)
            last = last_undamaged(
                self.folder, before=total, tell=lambda line: print(f"gsreal: {line}", file=sys.stderr, flush=True)
            )
        last_saved = gather_json(last and [str(last[0]), asdict(last[1])])[0]
        if last_saved is None:
            return Progress()
        path, progress = Path(last_saved[0]), TypeAdapter(Progress).validate_python(last_saved[1])
        _restore_shares(training, progress, progress.step - scenario.run.warmup_steps)
        with _raise_with_reason(path, "read"):
            load(_state_of(training), storage_reader=Reader(path), planner=Planner())
        _read_loss_scale(training, path)
        if not (progress.ranks == dist.get_world_size() and _read_own(training, path)):
            torch.manual_seed(hash((scenario.run.seed, progress.step, rank)))
        if rank == 0:
            print(f"gsreal: resumed at step {progress.step}", file=sys.stderr, flush=True)
        return progress

    def save(self, scenario: Scenario, training: Training, *, step: int, losses: Sequence[float]) -> None:
        """Save the training after `step` steps (a collective); `losses`: this rank's part of every loss so far."""
        from torch.distributed.checkpoint.state_dict_saver import save

        partial, path = self.folder / f"step-{step:08d}.partial", self.folder / f"step-{step:08d}"
        _write_own(training, partial)
        with _raise_with_reason(path, "saved"):
            save(_state_of(training), checkpoint_id=partial)  # returns once all ranks have written
        rank = dist.get_rank()
        own = [_own_file(partial), *partial.glob(f"__{rank}_*.distcp"), *([partial / METADATA] if rank == 0 else [])]
        parts = gather_json([list(losses), {file.name: _digest(file) for file in own}])
        note_progress(f"step {step} saved")
        if rank:
            return
        total = tuple(sum(each) for each in zip(*(part[0] for part in parts), strict=True))
        shared = training.rebalancer.next_shares if training.rebalancer else ((), ())
        files = {name: digest for part in parts for name, digest in part[1].items()}
        progress = Progress(step, total, len(parts), identity(scenario), *shared, files=files)
        write_text(partial / PROGRESS, json.dumps(asdict(progress)))
        _commit(partial, path)
        remove_leftovers(self.folder)


def check_checkpoints(scenario: Scenario, folder: Path, every: int, *, where: str) -> None:
    """Raise UserError if the scenario's training cannot be saved, or the folder has another training's checkpoints."""
    if every < 1:
        raise UserError(f"--every {every}: must be at least 1")
    reason = _unsupported_reason(scenario)
    if reason:
        raise UserError(f"{where}: --checkpoint: {reason}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--checkpoint {folder}: is no folder")
    last = last_undamaged(folder)
    if last is None:
        return
    progress = last[1]
    ours = identity(scenario)
    for key in {**progress.training, **ours}:  # some are only in one of them
        saved, asked = progress.training.get(key), ours.get(key)
        if saved != asked and not (key == FORM and saved == _form(scenario, counts_shards=True)):
            raise UserError(
                f"--checkpoint {folder}: was saved by another training: {key} = {saved!r} there, {asked!r} in {where}"
            )
    total = scenario.run.warmup_steps + scenario.run.steps
    if progress.step >= total:
        raise UserError(
            f"--checkpoint {folder}: has all {total} steps of {where} already (step {progress.step}); raise run.steps, "
            "or name another folder"
        )


def last_undamaged(
    folder: Path, *, before: int | None = None, tell: Callable[[str], None] = lambda line: None
) -> tuple[Path, Progress] | None:
    """Return the last undamaged checkpoint (of fewer steps than `before`), and its progress.

    `tell` is called with a line for each that is skipped. None if there are none; raises UserError if all are damaged.
    """
    faults: list[str] = []
    for path in reversed(_complete(folder)):
        if before is not None and _step_of(path) >= before:
            continue
        try:
            progress = read_progress(path)
            for name, digest in progress.files.items():
                if not OURS.fullmatch(name) or not (path / name).is_file():
                    raise UserError(f"{path}: is damaged: {name[:80]} is missing")
                if _digest(path / name) != digest:
                    raise UserError(f"{path}: is damaged: {name} does not match its digest")
        except UserError as error:
            faults.append(str(error))
            tell(f"{error}; skipped for the one before it")
        else:
            return path, progress
    if faults:
        raise UserError(
            f"{faults[0]}; all checkpoints there are damaged: remove them to start anew, or name another folder"
        )
    return None


def read_progress(path: Path) -> Progress:
    """Return a checkpoint's progress; raise UserError if the file is not one of ours."""
    try:
        values = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        version = values.get("format") if isinstance(values, dict) else FORMAT
        if version != FORMAT:
            raise UserError(f"{path}: has format {str(version)[:20]}, this gsreal reads {FORMAT}")
        unknown = set(values) - {each.name for each in fields(Progress)} if isinstance(values, dict) else ()
        if unknown:
            raise ValueError(f"unknown key {min(unknown)[:80]!r}")
        progress = validated(Progress, values, file=f"{path}: is not a checkpoint of gsreal: {PROGRESS}")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is not a checkpoint of gsreal: {PROGRESS}: {reason}") from None
    if progress.step != _step_of(path):
        raise UserError(f"{path}: is not a checkpoint of gsreal: {PROGRESS}: step = {progress.step}")
    return progress


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _raise_with_reason(path: Path, done: str) -> Iterator[None]:
    """Raise RunFailedError with a rank's reason in place of torch.distributed.checkpoint's error.

    That error is no subclass of Exception.
    """
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        fault = error.failures[rank][0]
        raise RunFailedError(f"{path}: cannot be {done}: rank {rank}: {type(fault).__name__}: {fault}") from None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed ranks left: unfinished checkpoints, and complete ones before the last `KEPT`.

    The caller holds the lock.
    """
    for left in folder.iterdir() if folder.is_dir() else ():
        if UNFINISHED.fullmatch(left.name):
            _remove(left)
    for old in _complete(folder)[:-KEPT]:
        _remove(old)


def _remove(path: Path) -> None:
    """Remove a checkpoint, complete or not, but no file that may be somebody else's."""
    if path.is_symlink() or not path.is_dir():
        return
    for file in path.iterdir():
        if OURS.fullmatch(file.name):
            file.unlink()
    with suppress(OSError):  # something else is in it
        path.rmdir()


FORM = "form of the optimizer's state"
"""Key of an identity: trainings with different forms of state cannot resume from each other's checkpoints."""


def identity(scenario: Scenario) -> dict[str, Any]:
    """Return the settings that a training's loss curve depends on, except the number of ranks and their shares."""
    workload, run = scenario.workload, scenario.run
    optional = {key: getattr(workload, key) for key in ("loss_scale", "clip_norm", "autocast", "frozen", "adapters")}
    set_keys = {  # as JSON gives them back
        f"workload.{key}": value if isinstance(value, float) else str(value)
        for key, value in optional.items()
        if value is not None
    }
    return {
        FORM: _form(scenario),
        "workload.model": f"{workload.model.name}, {workload.model.elements} parameters",
        "workload.data": str(workload.data),
        "workload.global_batch_size": workload.global_batch_size,
        "workload.sequence_length": workload.sequence_length,
        "workload.precision": workload.precision,
        **set_keys,
        "workload.optimizer": workload.optimizer,
        "workload.learning_rate": workload.learning_rate,
        "workload.momentum": workload.momentum,
        "workload.weight_decay": workload.weight_decay,
        "run.seed": run.seed,
        "run.warmup_steps": run.warmup_steps,
    }


def _form(scenario: Scenario, *, counts_shards: bool = False) -> str:
    """Return the kind of saved state: torch's, or that of Gradient Sharding, with or without master copies.

    `counts_shards`: whether shards of parameters count as master copies, as in checkpoints of earlier versions.
    """
    policies, copies = scenario.policies, has_master_copy(scenario.workload)
    if policies.gradients != "push":
        return "torch" + (", master copies" if copies and policies.parameters == "replicated" else "")
    copies = copies or scenario.plan.publish.threshold is not None
    copies = copies or (counts_shards and policies.parameters != "replicated")
    form = "gradient-sharding" + (", master copies" if copies else "")
    tied = tied_parameters(unrolled(scenario.workload.model), scenario.stage_ranges) if policies.pp > 1 else ()
    return form + (", a state for each copy of tied parameters" if tied else "")


def _unsupported_reason(scenario: Scenario) -> str | None:
    """Return why a plan's training cannot be saved, or None.

    Owners' shards are ranges of flat buckets, for which a slice of a block has no single index in the whole.
    """
    if scenario.policies.compressor is not None:
        return f"what method '{scenario.plan.method}' has not sent yet is not saved"
    if scenario.policies.sync_every_steps is not None:
        return "parameters of ranks that synchronize periodically differ in between, and only one rank's are saved"
    if scenario.policies.ep > 1:
        return "experts that ranks divide (plan.ep) are not saved yet"
    if scenario.policies.gradients == "push" and scenario.plan.schedule in INTERLEAVED:
        return "shards of several stages of a rank that pushes are not saved yet"
    if scenario.policies.gradients == "push" and scenario.policies.tp > 1:
        return "shards of blocks that are cut too (plan.tp beside pushes) are not saved yet"
    return None


def _complete(folder: Path) -> list[Path]:
    """Return all complete checkpoints, the last one last."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _commit(partial: Path, path: Path) -> None:
    """Give a complete checkpoint its final name, durably even across a power failure."""
    sync_folder(partial)
    before = path.with_name(f"{path.name}.replaced.partial")
    if path.exists():  # a damaged checkpoint, or one of the final step
        path.rename(before)
    partial.rename(path)
    sync_folder(path.parent)
    _remove(before)


def _state_of(training: Training) -> dict[str, Any]:
    """Return the state that torch.distributed.checkpoint saves of a training, or loads into it."""
    if isinstance(training.optimizer, GradientSharding):
        module = training.module
        if isinstance(module, StageModules):  # of one stage, whose parameters have their names in the whole model
            (module,) = module.stages
        return {"model": module, "optimizer": training.optimizer.sharded()}
    return {"training": Elements(training.module, training.optimizer)}


def _restore_shares(training: Training, progress: Progress, step: int) -> None:
    """Restore the division of batch and shards at the checkpoint, if they follow the rank speeds."""
    rebalancer, optimizer = training.rebalancer, training.optimizer
    if rebalancer is None or len(progress.samples) != dist.get_world_size():
        return
    _, owned = rebalancer.next_shares
    rebalancer.restore(step, progress.samples, progress.shard_shares)
    if isinstance(optimizer, GradientSharding) and progress.shard_shares != owned:
        optimizer.reshard(progress.shard_shares)


def _own_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}.pt"


def _write_own(training: Training, folder: Path) -> None:
    """Write this rank's own state."""
    own: dict[str, Any] = {"random": torch.get_rng_state(), "ranges": _ranges(training)}
    if torch.cuda.is_available():
        own["random_cuda"] = torch.cuda.get_rng_state()
    if isinstance(training.optimizer, GradientSharding):
        own["push"] = training.optimizer.pusher.state_dict()
    if training.scaler is not None:
        own["loss_scale"] = [training.scaler.scale, training.scaler.clean_steps]
    folder.mkdir(parents=True, exist_ok=True)
    with _own_file(folder).open("wb") as stream:
        torch.save(own, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _read_own(training: Training, folder: Path) -> bool:
    """Restore this rank's own state, if the shards' ranges are the same; return whether they are."""
    own = torch.load(_own_file(folder), weights_only=True)
    if own["ranges"] != _ranges(training):
        return False
    torch.set_rng_state(own["random"])
    if "random_cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["random_cuda"])
    if isinstance(training.optimizer, GradientSharding):
        training.optimizer.pusher.load_state_dict(own["push"])
    return True


def _read_loss_scale(training: Training, folder: Path) -> None:
    """Restore the factor on the loss, which is equal on all ranks, whatever the number of ranks is now."""
    if training.scaler is not None:
        # the file may have residuals of a GPU, which are not read
        first = torch.load(folder / "rank-0.pt", weights_only=True, map_location="cpu", mmap=True)
        training.scaler.scale, training.scaler.clean_steps = first["loss_scale"]


def _ranges(training: Training) -> list[list[tuple[int, int]]]:
    """Return every rank's range of every bucket."""
    if not isinstance(training.optimizer, GradientSharding):
        return []
    return [[(int(first), int(end)) for first, end in bucket.ranges] for bucket in training.optimizer.buckets]
