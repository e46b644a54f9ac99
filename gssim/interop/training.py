"""A training as other programs' files describe it: importers fill in a `Training`, some with the functions here."""

from dataclasses import dataclass, field
from typing import Any

from gssim.interop.reading import Keys, Value

OPTIMIZERS: dict[str, tuple[str, str, str | None]] = {
    "adam": ("adam", "default", None),
    "adamw": ("adamw", "default", None),
    "sgd": ("sgd", "default", None),
    "momentum": ("sgd-momentum", "default", None),
    "fusedadam": ("adamw", "fused", None),
    "adamw_torch": ("adamw", "default", None),
    "adamw_hf": ("adamw", "for-loop", None),
    "adamw_torch_fused": ("adamw", "fused", None),
    "adamw_apex_fused": ("adamw", "fused", None),
    "torch.optim.adam": ("adam", "default", None),
    "torch.optim.adamw": ("adamw", "default", None),
    "torch.optim.sgd": ("sgd", "default", None),
    "transformer_engine.pytorch.optimizers.fused_adam.fusedadam": ("adamw", "fused", None),
    **dict.fromkeys(
        (
            *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"),
            *("bitsandbytes.optim.adamw8bit", "torchao.optim.adamw8bit"),
        ),
        ("adamw", "fused", "8-bit"),
    ),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit", "torchao.optim.adamw4bit"), ("adamw", "fused", "4-bit")),
    "muon": ("muon", "default", None),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), ("adamw", "fused", None)),
}
"""(optimizer, implementation, precision of its moments) by other programs' names in lower case."""
OTHER_OPTIMIZER = "no such optimizer here: its state and its update are not modelled"
AMSGRAD = "a third value for each parameter, which AMSGrad keeps, is not modelled"
WHOLE_MODEL_COMPILED = (
    "the whole model is compiled there; modelled are blocks that are compiled one by one, as by torchtitan and by "
    "Accelerate's regional compilation"
)
PURE_16_BIT = (
    "approximated: parameters and optimizer state there are in 16 bits alone; here the optimizer updates fp32 copies"
)
PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "no", "false", "torch.float32"), "fp32"),
}


@dataclass
class Training:
    """Everything that a file says about a training; None where it says nothing."""

    world: Value | None = None
    """Number of ranks; absent: all devices of the cluster."""
    dp: Value | None = None
    """Number of data-parallel ranks over both axes."""
    dp_replicate: Value | None = None
    dp_shard: Value | None = None
    """Size of the axis; -1: all remaining ranks."""
    tp: Value | None = None
    pp: Value | None = None
    cp: Value | None = None
    context_exchange: Value | None = None
    """ring, gather or all-to-all; None: a ring."""
    context_split: Value | None = None
    """plain, if sequences are cut in one part a rank; None: in balanced parts."""
    ep: Value | None = None
    etp: Value | None = None
    """Number of tensor ranks that cut each divided expert; None: all of them."""
    sharding: Value | None = None
    """none, zero1, zero2 or zero3."""
    sharding_in_stages: Value | None = None
    """Sharding in a pipeline, if `sharding` is none; None: none too."""
    zero1_implementation: str = "torch"
    sequence_parallel: Value | None = None
    clip_norm: Value | None = None
    embedding_parallel: Value | None = None
    """Whether tensor-parallel ranks divide the token embedding, if it can be divided here."""
    loss_parallel: Value | None = None
    """Whether tensor-parallel ranks divide the vocabulary of head and loss, if it can be divided here."""
    micro_batch: Value | None = None
    """Samples of one forward on a rank."""
    accumulation: Value | None = None
    """Number of micro-batches of a rank in a step."""
    global_batch: Value | None = None
    pipeline_micro_batch: Value | None = None
    """Samples of a pipeline's micro-batch, if the pipeline divides `micro_batch` further."""
    sequence: Value | None = None
    precision: Value | None = None
    gradient_precision: Value | None = None
    reduce_precision: Value | None = None
    divided_reduce_precision: Value | None = None
    """DeepSpeed's precision of reductions where ranks divide sequences; absent: fp32."""
    autocast: Value | None = None
    tf32: Value | None = None
    adapters: Value | None = None
    """The table of `workload.adapters`; its targets are names of maps, or patterns of their paths."""
    fused_loss: Value | None = None
    frozen_precision: Value | None = None
    """`nf4-double` and so on; None: frozen weights have the training precision."""
    trained: Value | None = None
    """Regular expressions (in axolotl's form) for the names of the only trained parameters."""
    loss_scale: Value | None = None
    """Loss scale in fp16; absent: dynamic."""
    optimizer: Value | None = None
    optimizer_implementation: Value | None = None
    optimizer_state_precision: Value | None = None
    learning_rate: Value | None = None
    weight_decay: Value | None = None
    momentum: Value | None = None
    recompute: Value | None = None
    schedule: Value | None = None
    short_schedules: bool = False
    """Whether the program runs 1f1b with fewer micro-batches than stages."""
    even_stages: bool = False
    """Whether every stage has equally many blocks, except as the next two fields say; if not, stages are balanced."""
    ends_in_blocks: tuple[Value, Value] | None = None
    """How many blocks embedding and head count as where torchtitan divides blocks into stages."""
    most_blocks_per_stage: Value | None = None
    """With `ends_in_blocks`, the size of stages from which their number follows."""
    stage_modules: Value | None = None
    """Names of the modules in each stage, as torchtitan has them."""
    first_stage_blocks: Value | None = None
    last_stage_blocks: Value | None = None
    stages_per_rank: Value | None = None
    blocks_per_stage: Value | None = None
    offload: Value | None = None
    """optimizer or parameters, as in `plan.offload`."""
    receive_buffers: Value | None = None
    """Receive buffers of a pipeline's stages, if there is a pipeline."""
    gradient_sync: Value | None = None
    bucket_bytes: Value | None = None
    bucket_elements: Value | None = None
    """Largest number of elements in a gradient bucket of DeepSpeed's stages 1 and 2."""
    bucket_parameters: Value | None = None
    """Least number of parameters in a gradient bucket of Megatron-LM; 0: its default; None: another program's file."""
    bucket_count: Value | None = None
    """Number of gradient buckets of Megatron-LM, all of which have so many of the rank's parameters."""
    overlap: Value | None = None
    gathers_beside_forward: Value | None = None
    """Whether parameters that Megatron-LM's distributed optimizer updated are gathered beside the next forward."""
    gathered_inputs: Value | None = None
    """Whether inputs are gathered again in the backward, with sequence parallelism; None: they are kept for it."""
    tp_overlap: Value | None = None
    """Whether exchanges of sequence parallelism overlap with matrix products."""
    async_input_gradients: Value | None = None
    """Whether all-reduces of input gradients over tensor-parallel ranks overlap with weight-gradient products."""
    fused_maps: bool = False
    """Whether queries, keys and values are one map of a block, and gate and up another."""
    compiled: Value | None = None
    """Whether each block is compiled by itself; None if the program does not compile."""
    seed: Value | None = None
    architecture: dict[str, Value] = field(default_factory=dict)
    """Sizes of the model, by the names of `ARCHITECTURE` in `models`."""
    base_model: Value | None = None
    """Name of the model, which may say how many parameters it has; see `stated_elements` in `models`."""
    shares_embedding: Value | None = None
    """Whether the model's head has the token embedding's weight; None if the file does not describe the model."""

    def has_context_ranks(self, keys: Keys) -> bool:
        """Return whether the file or `--set` divides sequences among ranks; these then shard state too."""
        return "plan.cp" in keys.overridden or (self.cp is not None and self.cp.value != 1)


@dataclass(frozen=True)
class Entry:
    """One key of the scenario to be written."""

    key: str
    value: Any
    comment: str
    is_default: bool = False

    @classmethod
    def of(cls, key: str, value: Value) -> "Entry":
        """Return the entry of a value as it was read."""
        return cls(key, value.value, value.origin)


def optimizer_in(keys: Keys, training: Training, *names: str) -> None:
    """Read an optimizer and its implementation from the first of these keys that the file holds."""
    optimizer = keys.choice(OPTIMIZERS, *names, sets="workload.optimizer", why=OTHER_OPTIMIZER)
    if optimizer is not None:
        kind, implementation, state = optimizer.value
        training.optimizer = Value(kind, optimizer.origin)
        if implementation != "default":
            training.optimizer_implementation = Value(implementation, optimizer.origin)
        if state is not None:
            training.optimizer_state_precision = Value(state, optimizer.origin)
        if "paged" in optimizer.origin:
            keys.listed.append((optimizer.origin, "approximated: its paged state stays in the device's memory"))


def torchs_context_exchange(keys: Keys, *names: str) -> Value:
    """Return how torch's context parallelism exchanges keys and values, which a key may say; gathered by default."""
    exchange = keys.choice({"allgather": "gather", "alltoall": "ring"}, *names, sets="plan.context_exchange")
    return exchange or Value("gather", "torch's context parallelism gathers keys and values (its default)")


def bucket_in(keys: Keys, training: Training, name: str) -> None:
    """Read the size of DDP's buckets, which a key gives in MiB; 0: the default."""
    bucket = keys.number(name, sets="plan.bucket_bytes")
    if bucket is not None and bucket.value:
        training.bucket_bytes = Value(int(bucket.value * 2**20), bucket.origin)
