"""What a row of a table says: a training that was run, and what was measured of it."""

from dataclasses import dataclass
from typing import Literal

from analysis.published.platforms import Server
from analysis.published.shape import Shape, Software

Method = Literal["single", "ddp", "zero1", "zero2", "zero3", "pipeline", "tensor"]
Metric = Literal["allocated", "reserved", "device"]
"""Peak bytes that tensors took; that the allocator had taken from the device; that were in use on the device."""


class SkippedError(Exception):
    """A row that cannot be scored: why, in words that many rows share."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training step that somebody timed."""

    identity: str
    source: str
    gpu: str
    per_node: int | None
    servers: tuple[Server, ...] = ()
    """Where they are not all alike, in rank order; else `gpu` and `per_node` tell of all."""
    shape: Shape
    software: Software
    method: Method
    dp: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    """Stages of each of a pipeline's ranks."""
    blocks_of_stages: tuple[int, ...] | None = None
    """Absent: as evenly as may be."""
    micro_batch: int
    """Samples of a rank."""
    micro_batches: int
    recompute: Literal["none", "selective", "full"]
    overlap: bool
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    step_s: float | None
    memory_bytes: float | None = None
    memory_metric: Metric | None = None
    memory_of: Literal["most", "last"] = "most"
    """Whose memory was measured: of the rank that needs most, or of the last one."""

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp * self.software.context_ranks

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.dp * self.micro_batches * self.micro_batch * self.shape.sequence_length
