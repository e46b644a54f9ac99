"""A tensor that is spread over ranks, as torch.distributed.checkpoint reads and writes it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations on each piece."""


class Part(torch.Tensor):
    """A tensor of which this rank holds some pieces: torch.distributed.checkpoint reads and writes those alone."""

    pieces: dict[tuple[int, ...], Tensor]
    """By where their first element is in the whole; some may be empty."""

    @staticmethod
    def __new__(cls, pieces: Mapping[tuple[int, ...], Tensor], size: Sequence[int]) -> "Part":
        """Make it of what is held, of which there must be one piece at least, and the size of the whole."""
        like = next(iter(pieces.values()))
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=like.dtype, device=like.device)
        made.pieces = dict(pieces)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copy what is held, as `async_save` does before it writes; refuse to compute: the most is elsewhere."""
        if func is torch.ops.aten.new_empty.default:  # the pieces follow as an attribute
            device = (kwargs or {}).get("device")
            return cls({first: piece.new_empty(0, device=device) for first, piece in args[0].pieces.items()}, args[1])
        if func in COPIES:
            pieces = {first: func(piece, *args[1:], **(kwargs or {})) for first, piece in args[0].pieces.items()}
            return cls(pieces, args[0].shape)
        raise NotImplementedError(f"{func} on a part of a tensor")

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        held = ", ".join(f"{tuple(piece.shape)} at {first}" for first, piece in self.pieces.items())
        return f"Part({held} of {tuple(self.shape)}, {self.dtype})"

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for first, piece in self.pieces.items():
            if piece.numel():
                yield ChunkStorageMetadata(torch.Size(first), piece.size())

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what to write: the pieces that are not empty."""
        properties = TensorProperties.create_from_tensor(next(iter(self.pieces.values())))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what to read."""
        return list(self._chunks())

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return where to read from or write to."""
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]
