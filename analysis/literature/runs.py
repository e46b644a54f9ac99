"""Published training runs: hyper-parameters of the model, features of the software, parallel plan, measured figures."""

from dataclasses import dataclass, replace
from typing import Literal

from analysis.literature.platforms import Server
from gssim.plan import MethodName
from gssim.units import Precision


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of multi-head latent attention: of the narrow products, and of each head."""

    query_rank: int = 1536
    kv_rank: int = 512
    plain_width: int = 128
    """Width of a head's queries and keys without positions."""
    rotary_width: int = 64
    """Width of their part with rotary positions; all heads share that of keys."""
    value_width: int = 128


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts in place of the perceptrons of all blocks but the first ones.

    The last three say how Megatron-LM runs them (core/transformer/moe: experts.py, token_dispatcher.py, moe_utils.py).
    """

    count: int
    chosen: int
    """Experts of a token."""
    width: int
    shared_width: int = 0
    """Width of the expert that all tokens take besides; 0: there is none."""
    dense_blocks: int = 1
    """Number of blocks, the first ones, that have a plain perceptron."""
    capacity_ratio: float | None = None
    """Rows of each expert over an even share of them; None: no token is dropped, and loads are balanced."""
    grouped: bool = True
    """The products of a rank's experts are one call; else experts run one after another."""
    gathers_tokens: bool = False
    """Ranks gather all tokens and pick those of their experts (`allgather`); else they send tokens (`alltoall`)."""
    fused_permutation: bool = True
    """Tokens are sorted by expert in one kernel; else by a mask, its transpose, selected indices and a gather."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Blocks behind an encoder, which attend to its output too (Raffel et al. 2020, T5, arXiv:1910.10683)."""

    layers: int
    sequence_length: int


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
    """Whether the output layer shares the embedding's weight; absent: only where `gpt`."""
    windows: "Windows | None" = None
    """The last blocks of an image generator, of another shape; its loss is the mean of what they return."""

    further: int = 0
    """Further blocks behind the others: each predicts one more token, with the output layer that all share (DeepSeek-AI
    2024, DeepSeek-V3, arXiv:2412.19437, section 2.2); only the first is modelled exactly.
    """
    embeds_again: bool = False
    """Whether the further blocks have a copy of the embedding, as on another stage."""
    head_width: int | None = None
    """Width of a head's queries in a `llama`; absent: the model's width over the number of heads."""
    decoder: Decoder | None = None
    """A decoder behind the blocks, which are then an encoder."""
    latent: Latent | None = None
    """Widths of multi-head latent attention, as in DeepSeek's models; None: plain attention."""
    experts: Experts | None = None
    """Mixtures of experts."""
    biased: bool = True
    """Whether linear layers of a `gpt` have a bias."""
    gated: bool = False
    """Whether the perceptron of a `gpt` is gated (SwiGLU), with its two first maps in one product."""
    rectified: bool = False
    """Whether the activation of a `gpt` is ReLU, whose backward needs its output alone; else GELU, which needs its
    input."""

    @property
    def ties(self) -> bool:
        """Whether the output layer has no parameters of its own, if it is on the embedding's rank."""
        return self.kind == "gpt" if self.tied is None else self.tied

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.query_width // self.heads * self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.hidden if self.head_width is None else self.heads * self.head_width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model.

        >>> gpt3 = Shape(kind="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocabulary=51200,
        ...     sequence_length=2048)
        >>> round(gpt3.parameters / 1e9, 1)
        174.6
        """
        h, maps = self.hidden, 3 if self.kind == "llama" or self.gated else 2
        ends = (1 if self.ties else 2) * self.vocabulary * h
        if self.windows is not None:
            last = self.windows.shape
            first = replace(self, windows=None, layers=self.layers - last.layers).parameters
            return first + last.layers * 12 * last.hidden**2
        if self.latent is not None and self.experts is not None:
            return self._latent_parameters(self.latent, self.experts)
        if self.decoder is not None:
            block = (16 + (maps - 2)) * h * h + maps * h * (self.ffn - 4 * h)
            return replace(self, decoder=None).parameters + self.decoder.layers * block
        if self.experts is not None:
            experts = self.experts
            routed = h * experts.count + maps * h * (experts.count * experts.width + experts.shared_width)
            plain = replace(self, experts=None).parameters
            return plain + (self.layers - experts.dense_blocks) * (routed - maps * h * self.ffn)
        block = 2 * h * self.query_width + 2 * h * self.kv_width + maps * h * self.ffn
        if self.kind == "gpt":
            block += 4 * h + 2 * h + 2 * self.kv_width + self.ffn + h
            return self.layers * block + ends + self.sequence_length * h + 2 * h
        return self.layers * (block + 2 * h) + ends + h

    def _latent_parameters(self, latent: Latent, experts: Experts) -> int:
        """Return the parameters of a model with latent attention and experts."""
        h, of_heads = self.hidden, self.heads * (latent.plain_width + latent.value_width)
        queries = self.heads * (latent.plain_width + latent.rotary_width)
        attention = latent.query_rank * (h + 1 + queries) + h * (latent.kv_rank + latent.rotary_width)
        attention += latent.kv_rank * (1 + of_heads) + self.heads * latent.value_width * h
        routed = h * experts.count + 3 * h * (experts.count * experts.width + experts.shared_width)
        sparse = self.layers - experts.dense_blocks
        ends = 2 * self.vocabulary * h + h
        return self.layers * (attention + 2 * h) + experts.dense_blocks * 3 * h * self.ffn + sparse * routed + ends


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Blocks whose attention is within windows of an image (Jiang et al. 2021, TransGAN, grid self-attention)."""

    shape: Shape
    """Shape of these blocks; `sequence_length` is that of a window."""
    count: int
    """Windows of a sample."""


def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, sequence_length: int) -> Shape:
    """Return a GPT whose feed-forward layers are four times as wide as its hidden size."""
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


MEGATRON_CLIP_NORM = 1.0
"""Default of --clip-grad (Megatron-LM, arguments.py)."""
MEGATRON_MESSAGE_CALLS = 9
"""Operations for a message between stages: the receiver's buffer, its call, waiting, and a view of what came; the
sender's call, waiting, and letting go of what it sent; the group of calls, and the device synchronised behind it
(Megatron-LM, core/pipeline_parallel/p2p_communication.py, `_communicate`, and schedules.py,
`deallocate_output_tensor`)."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Features of the training software that change a model's operations."""

    precision: Precision = "bf16"
    tensor_float: bool = False
    """Matrix products in fp32 are computed as TF32."""
    flash_attention: bool = False
    """Scores are never written to memory; with a causal mask only half of them are computed."""
    dropout: bool = True
    """Dropout after attention and after each block's output layers."""
    fused_softmax: bool = True
    """Scale, mask and softmax are one kernel, as in half precision; else three kernels of torch."""
    float_softmax: bool = False
    """Where they are kernels of their own, these are five, and compute in float (Megatron-LM, model/fused_softmax.py,
    forward_torch_softmax with attention_softmax_in_fp32)."""
    partitioned: bool = False
    """Between blocks a rank stores only its shard of the activations, as where pipeline stages send shards that are
    gathered on arrival (Narayanan et al. 2021, section 4.1; DeepSpeed's PipelineEngine does it too)."""
    compiled: bool = False
    """Memory-bound operations are fused with adjacent ones (torch.compile)."""
    early_stop: bool = True
    """Recomputation ends once all tensors exist that the backward needs (torch does so, Megatron does not)."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers each rank stores its shard of the sequence."""
    gathers_alone: bool = False
    """With sequence parallelism, gathers and reduce-scatters are calls of their own, and the backward gathers a layer's
    input again, which Megatron-LM does not save (core/tensor_parallel/layers.py); else they are counted as the
    all-reduces that they add up to. The backward's gathers overlap with products and slow them down, which is not
    modelled.
    """
    dummy_gradients: bool = False
    """A tensor of the size of each linear layer's weight is kept, one for each shape: Transformer Engine hands it to
    autograd where products add to gradients themselves (module/base.py, get_dummy_wgrad). The output layer, which is
    Megatron-LM's, allocates one of its own in each backward (core/tensor_parallel/layers.py, grad_weight)."""
    receives_in_flight: bool = False
    """Stages of a pipeline have receive buffers only for messages in flight (`plan.receive_buffers`)."""
    serial_messages: bool = False
    """Stages of a pipeline send and receive one message at a time, as DeepSpeed's PipelineEngine."""
    context_ranks: int = 1
    """Ranks that share each sequence, with ring attention: sizes are those of a rank's part of the sequence."""
    rings: bool = False
    """Context ranks are those of `plan.cp`, each exchange of whose rings is waited for as soon as it has begun
    (`plan.context_overlap`): so compiled blocks do, see `TransformerBuilder.ring`. Else they count as data ranks with
    shorter sequences, whose exchanges take no time."""
    overlaps_rings: bool = False
    """The exchanges of `rings` overlap with the attention to blocks of keys and values."""
    rings_of_groups: bool = False
    """`rings` carry keys and values once for each group of queries, as kernels for grouped queries read them
    (Transformer Engine, pytorch/attention.py, AttnFuncWithCP). Else they are repeated for every head (torchtitan,
    `repeat_kv`)."""
    float8_maps: bool = False
    """The blocks' linear layers are in float8 (`workload.map_precision`)."""
    attention_ratio: float = 1.0
    """Rate of flash attention relative to that of linear layers."""
    recomputes_attention: bool = False
    """Selective recomputation is Megatron-LM's: of the attention from scores to context alone (Korthikanti et al. 2022,
    section 5), not of everything but matrix products."""
    gathers_inputs: bool = False
    """With sequence parallelism, the input of tensor-parallel layers is gathered into one tensor that they all save;
    see `OperationBuilder.gathered_input`."""
    fused_loss: bool = False
    """The loss is one kernel each way, without logits in float (torch.compile; flash-attention's cross-entropy)."""
    loss_gradient_in_place: bool = False
    """A fused loss writes the gradient of the logits over them (Transformer Engine's cross-entropy)."""
    separate_adds: bool = False
    """Residual sums are kernels of their own also where other operations are fused (Megatron-LM's bias-dropout-add)."""
    copies_keys: bool = True
    """Queries and keys are kept both as their product left them and as rotated; else as rotated alone, the values
    beside them."""
    in_place_loss: bool = False
    """Logits in float exist as one tensor at a time (Megatron-LM, core/tensor_parallel/cross_entropy.py)."""
    pipelined_maps: bool = False
    """The all-gather of a tensor-parallel layer's input is split into parts that alternate with the product, and no
    gathered tensor is saved; reduce-scatters likewise (torch's asynchronous tensor parallelism, Transformer Engine's
    userbuffers). With `gathers_alone`."""
    gathers_float8: bool = False
    """With `float8_maps` and `pipelined_maps`, inputs and gradients of outputs are cast to float8 before they are
    gathered, as by Transformer Engine's userbuffers (1.13, pytorch/module/base.py, initialize_ub, fp8_buf of all layers
    that gather)."""
    sums_beside_products: bool = False
    """Without sequence parallelism, the sum of a map's input gradient over tensor-parallel ranks runs beside the
    product that gives the weight's gradient (Megatron-LM since 2022, core/tensor_parallel/layers.py)."""
    lists_ranks: bool = False
    """With `zero3`, each tensor has a gather and a reduce-scatter of its own, whose list of the ranks' parts the host
    makes and copies one by one while the device waits (DeepSpeed's first ZeRO-3, 0.3.13,
    runtime/zero/partition_parameters.py, `_allgather_param`, which synchronizes the device, and
    `_reduce_scatter_gradient`; torch 1.8, ProcessGroupNCCL.cpp, copies to and from flat tensors)."""
    fused_projections: bool = False
    """Queries, keys and values are one product of the input, and so are the gate and the other map (Megatron-LM)."""
    kernels: str | None = None
    """Machine whose measured rates of kernels by shape are used, see `kernels`; absent: the device's own rate."""
    graphs_attention: bool = False
    """The attention, with its norm and the sum behind it, is a CUDA graph, which the host launches at once."""
    flash_calls: int = 1
    """Operations that the host launches for the forward of flash attention."""
    message_calls: int = 0
    """The same for a message between stages of a pipeline, at both ends; without those of `unpacking_calls`."""
    unpacking_calls: int = 0
    """Those of the receiver that only the computation with what came waits for."""
    host_passes: int = 0
    """How many times the receiving host reads or writes memory of the whole message's size."""
    rotary_calls: int = 0
    """The same to turn queries and keys of a `gpt` by their positions; 0: positions are learned."""
    checks_norms_over: int | None = None
    """Queries and keys are normalised, and in each forward the weights of these norms are compared with those of this
    number of ranks (Megatron-LM, core/transformer/attention.py, `run_realtime_tests`, of --test-mode).
    """
    compiled_loss: bool = False
    """An in-place loss is compiled, and then in place no more: its exponentials are a second tensor (Megatron-LM,
    core/fusions/fused_cross_entropy.py)."""
    operation_overhead_s: float | None = None
    """Host time to launch an operation, if the hosts are known to take another time than the device's file states."""
    parallel_loss: bool = False
    """The loss of sharded logits is torch's `loss_parallel` (torch 2.13, distributed/tensor/parallel/loss.py)."""
    float_gradients: bool = False
    """Gradients are accumulated in float beside 16-bit parameters (Megatron-LM's main_grad, where bf16)."""


Metric = Literal["allocated", "reserved", "device"]
"""Peak bytes of tensors; peak bytes that the allocator reserved; peak bytes in use on the device."""


class SkippedError(Exception):
    """A row that cannot be scored; its message is the reason, in the same words for all such rows."""


class UnscoredError(SkippedError):
    """A row that has nothing to score, or not all details, but whose run can be written as a scenario."""

    def __init__(self, reason: str, run: "Run") -> None:
        super().__init__(reason)
        self.run = run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A table's own figures of compute and network, which replace the model's operations and the data sheets."""

    parameters: int
    compute_s: float
    """A step's compute on one device."""
    link_bytes_per_s: float
    """Rate of each host's link, from the exchange of one row of the table."""
    sync_every_steps: int | None
    """Steps from one synchronization of the parameters to the next; None: gradients are reduced in every step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published training run: plan, model, software and measured figures."""

    identity: str
    source: str
    gpu: str
    per_node: int | None
    servers: tuple[Server, ...] = ()
    """The servers in rank order, where they differ; else `gpu` and `per_node` describe all of them."""
    shape: Shape
    software: Software
    method: MethodName
    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks that divide experts, of those of `dp`."""
    etp: int | None = None
    """Tensor ranks that divide each expert; absent: all."""
    chunks: int = 1
    """Pipeline stages per rank (virtual stages)."""
    blocks_of_stages: tuple[int, ...] | None = None
    """Blocks of each stage; absent: as even as possible."""
    micro_batch: int
    """Samples of a rank's micro-batch."""
    micro_batches: int
    recompute: Literal["none", "selective", "full"]
    overlap: bool
    shards: int | None = None
    """Ranks among which the data-parallel axis shards, in replicas of that size; absent: all, where the method does."""
    optimizer: Literal["adam", "adamw", "sgd", "muon"] = "adamw"
    step_s: float | None
    memory_bytes: float | None = None
    memory_metric: Metric | None = None
    measured: Measured | None = None
    sums_tied_gradients: bool = True
    """Whether the first and last stage of a pipeline sum their gradients of the embedding, where it is tied."""
    clip_norm: float | None = None
    """Largest norm of all gradients, to which they are scaled down."""
    scales_loss: bool = False
    """Whether the loss is scaled, as in fp16, so that a pass over the gradients unscales and checks them."""
    flat_optimizer: bool = False
    """For `zero1`: Megatron-LM's distributed optimizer, whose gradients are in one buffer that is reduce-scattered; of
    `muon` the layer-wise one."""
    gathers_beside_forward: bool = False
    """With `flat_optimizer`, updated parameters are gathered beside the next forward (Megatron-LM's
    `overlap_param_gather`)."""
    deferred_outputs: int = 0
    """Number of micro-batches whose gradients of the logits, and inputs of the output layer, are kept to the step's
    end, where that layer's weight gets its gradient from them (Megatron-LM, core/tensor_parallel/layers.py,
    `wgrad_deferral_limit`).
    """
    float_reduction: bool = False
    """Gradients are reduced in float."""
    calibration: bool = False
    """Whether the table's other rows take a rate from this one, which is then not scored."""
    memory_of: Literal["most", "last"] = "most"
    """The rank whose memory was measured: the one that needs most, or the last one."""

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp * self.software.context_ranks

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.dp * self.micro_batches * self.micro_batch * self.shape.sequence_length
