"""Reads checkpoints of torch.distributed.checkpoint without running code: a pickle may name any function to call.

torch's own reader unpickles `.metadata` and each value that is no tensor without restrictions (torch 2.13,
checkpoint/filesystem.py and default_planner.py). Here the first may name only what describes a checkpoint, and the
others only what `torch.load(weights_only=True)` lets pass.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from gssim.units import UserError

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
"""Classes and functions that the description of a checkpoint may name, beside torch's data types."""


class _ForbiddenNameError(Exception):
    """A pickle names something that is no part of a checkpoint's description."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if that only holds data."""
        if (module, name) in NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise _ForbiddenNameError(f"names {module}.{name}, which is no part of a checkpoint; it was not run")


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder; raises UserError at once where its description is none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _metadata_in(folder / ".metadata")

    def read_metadata(self, *_args: Any, **_settings: Any) -> Metadata:
        """Return the description of the checkpoint."""
        described = getattr(self._metadata, "storage_meta", None) or StorageMeta()
        described.load_id = self.load_id
        self._metadata.storage_meta = described
        return self._metadata


class Planner(DefaultLoadPlanner):
    """torch's planner; it takes up no values but plain ones and tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take up a value that is no tensor."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _metadata_in(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except _ForbiddenNameError as error:
        raise UserError(f"{file}: {error}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"{file}: does not describe a checkpoint: {type(error).__name__}: {error}") from None
    if not isinstance(found, Metadata):
        raise UserError(f"{file}: does not describe a checkpoint, but is a {type(found).__name__}")
    return found
