"""What a row of a table says: a training that was run, and what was measured of it.

What is trained and by which software: a model's hyper-parameters, and what makes other operations of it.
"""

from dataclasses import dataclass
from typing import Literal

from analysis.literature.platforms import Server
from gssim.plan import MethodName
from gssim.units import Precision


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Hyper-parameters of a decoder (or encoder) of equal blocks."""

    kind: Literal["gpt", "llama"]
    """`gpt`: layer norms, biases, two maps with a GELU between; `llama`: RMS norms, rotary positions, SwiGLU."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence_length: int
    predicted: int | None = None
    """Tokens of a sequence that have logits; absent: all."""
    tied: bool | None = None
    """Whether the embedding's weight serves for logits too; absent: where `gpt`."""

    @property
    def ties(self) -> bool:
        """Whether the head has no parameters of its own, if it is on one rank with the embedding."""
        return self.kind == "gpt" if self.tied is None else self.tied

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """Parameters of the whole model.

        >>> gpt3 = Shape(kind="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocabulary=51200,
        ...     sequence_length=2048)
        >>> round(gpt3.parameters / 1e9, 1)
        174.6
        """
        h, maps = self.hidden, 2 if self.kind == "gpt" else 3
        ends = (1 if self.ties else 2) * self.vocabulary * h
        block = 2 * h * h + 2 * h * self.kv_width + maps * h * self.ffn
        if self.kind == "gpt":
            block += 4 * h + 2 * h + 2 * self.kv_width + self.ffn + h
            return self.layers * block + ends + self.sequence_length * h + 2 * h
        return self.layers * (block + 2 * h) + ends + h


def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, sequence_length: int) -> Shape:
    """Return a GPT whose blocks' first map is four times as wide as they are."""
    return Shape(
        kind="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
    )


@dataclass(frozen=True, kw_only=True)
class Software:
    """What of the software that ran a model makes other operations of it."""

    precision: Precision = "bf16"
    tensor_float: bool = False
    """Matrix products of fp32 are multiplied as TF32."""
    flash_attention: bool = False
    """Scores are never written, and where the mask is causal, only half of them are computed."""
    dropout: bool = True
    """Of attention and of each map's output."""
    fused_softmax: bool = True
    """Scale, mask and softmax are one kernel, as in half precision; else three, of torch."""
    partitioned: bool = False
    """Between blocks a rank has its part of the activations, as where stages of a pipeline pass on parts of them that
    are gathered on arrival (Narayanan et al. 2021, section 4.1; DeepSpeed's PipelineEngine does it too)."""
    compiled: bool = False
    """Operations that only stream are fused with their neighbours (torch.compile)."""
    early_stop: bool = True
    sequence_parallel: bool = False
    """Between cut blocks, each rank has its part of the sequence."""
    context_ranks: int = 1
    """Ranks that share each sequence, attention in a ring: sizes are of a rank's part of it."""
    map_speedup: float = 1.0
    """Rate of the blocks' maps over that of the precision: float8."""
    float8_casts: bool = False
    attention_ratio: float = 1.0
    """Rate of flash attention over that of maps."""
    gathers_inputs: bool = False
    """With sequence parallelism, what cut maps read is gathered into a tensor that they all keep; see
    `Writer.cut_input`."""
    fused_loss: bool = False
    """The loss is one kernel each way, without logits in float (torch.compile; flash-attention's cross-entropy)."""
    in_place_loss: bool = False
    """Of logits in float there is one tensor at a time (Megatron-LM, core/tensor_parallel/cross_entropy.py)."""
    pipelined_maps: bool = False
    """Gathering is cut into parts among those of the maps that read it, and keeps nothing whole (torch's asynchronous
    tensor parallelism). That parts hide behind each other is not modelled."""
    parallel_loss: bool = False
    """The loss of cut logits is torch's `loss_parallel` (torch 2.13, distributed/tensor/parallel/loss.py)."""
    float_gradients: bool = False
    """Gradients are added up in float beside 16-bit parameters (Megatron-LM's main_grad, where bf16)."""


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
    method: MethodName
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
