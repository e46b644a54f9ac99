"""Registry of methods: the policies that each one sets, its mesh axes, and what executes it in a real run.

Everything else that depends on a method's name reads this table: messages, the search's candidates, charts, tests,
and `gssim support`. A method made of existing policies is one entry here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gssim.units import Precision


@dataclass(frozen=True)
class Method:
    """A named combination of policies; `plan` may override each of them."""

    name: str
    description: str
    real: str
    """PyTorch's or this project's wrapper that executes it."""
    parameters: str
    gradients: str
    optimizer_state: str
    partition: str = "data"
    gradient_sync: str = "step"
    compress: Precision | None = None
    """16-bit format in which buckets of gradients are all-reduced; None: the workload's precision."""
    compressor: str | None = None
    """`powersgd` or `topk`: how buckets of gradients are compressed beyond their precision; None: not at all."""
    sync_every_steps: int | None = None
    """Steps from one synchronization of the parameters to the next; None: ranks' parameters are always equal."""
    outer_optimizer: Literal["nesterov", "sparse"] | None = None
    """What a synchronization does with the ranks' changes of the parameters: an outer Nesterov step follows their mean;
    or the largest are added, with error feedback. None: parameters are averaged instead."""
    in_fragments: bool = False
    """A synchronization is cut in fragments of the parameters, at different steps, whose exchanges go on behind the
    steps that follow; else all parameters are synchronized at once, while ranks wait."""
    push_axis: str = "dp_shard"
    """Data axis along which gradients are pushed to their owners."""
    slices: str = "even"
    """Sizes of the slices into which tensor groups cut blocks: `even`, or by the shard `shares`."""
    axis: str = "dp_shard"
    """The method's own mesh axis: it takes the ranks that the other axes leave, where the plan does not size it."""
    two_levels: bool = False
    """Whether a plan that sizes no axis has its shards inside hosts, and its replicas across hosts."""
    in_pipelines: bool = False
    """Can run in the stages of a pipeline."""
    searched: bool = True
    """`gssim search` tries it by default: it is no other name of a method, and trains as one device does."""

    programs: tuple[str, ...] = ()
    """Other programs that execute it: `gssim export` writes their files."""

    @property
    def is_gradient_sharding(self) -> bool:
        """Whether ranks own shards of any size: gradients, weight gradients or slices of blocks."""
        return self.gradients == "push" or self.partition == "weight-gradient" or self.slices == "shares"

    @property
    def exchanges_all_gradients(self) -> bool:
        """Whether ranks exchange all their gradients in every step, if no threshold is set."""
        return self.compressor is None and self.sync_every_steps is None

    @property
    def can_replicate(self) -> bool:
        """Whether replicas all-reduce their gradients, so that `dp_replicate` can take the ranks that are left."""
        return self.gradients in ("all-reduce", "reduce-scatter")


EVERYWHERE = ("deepspeed", "accelerate", "torchtitan", "torchrun")
"""Programs that execute the usual methods."""

_REPLICATED: dict[str, Any] = {"parameters": "replicated", "optimizer_state": "replicated"}
_PERIODIC: dict[str, Any] = _REPLICATED | {"gradients": "periodic", "sync_every_steps": 8}
SHARDED: dict[str, str] = {
    "parameters": "sharded",
    "gradients": "reduce-scatter",
    "optimizer_state": "sharded",
    "gradient_sync": "micro-batch",
}
"""Policies of `zero3`, and of the ranks of a replica that methods of periodic synchronization shard."""
_FULLY_SHARDED: dict[str, Any] = SHARDED | {"programs": EVERYWHERE, "in_pipelines": True}
_PUSHED: dict[str, Any] = {"parameters": "replicated", "gradients": "push", "optimizer_state": "sharded"}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("single", "One device.", "the module itself", gradients="local", programs=EVERYWHERE, **_REPLICATED),
        Method(
            "ddp",
            "Data parallelism: gradients are all-reduced in buckets.",
            "torch.nn.parallel.DistributedDataParallel",
            gradients="all-reduce",
            programs=EVERYWHERE,
            axis="dp_replicate",
            in_pipelines=True,
            **_REPLICATED,
        ),
        Method(
            "zero1",
            "ZeRO stage 1: gradients are all-reduced, optimizer states are sharded by tensors.",
            "torch.distributed.optim.ZeroRedundancyOptimizer",
            parameters="replicated",
            gradients="all-reduce",
            optimizer_state="sharded",
            axis="dp_replicate",
            in_pipelines=True,
            programs=("deepspeed",),
        ),
        Method(
            "half",
            "Data parallelism: gradients are all-reduced in buckets that are cast to bf16 or fp16.",
            "DistributedDataParallel with bf16_compress_hook or fp16_compress_hook",
            gradients="all-reduce",
            compress="bf16",
            axis="dp_replicate",
            searched=False,
            **_REPLICATED,
        ),
        Method(
            "powersgd",
            "PowerSGD: matrices of gradients are all-reduced as products of two of low rank, with error feedback.",
            "DistributedDataParallel with a communication hook of gsreal.methods.compressed",
            gradients="all-reduce",
            compressor="powersgd",
            axis="dp_replicate",
            searched=False,
            **_REPLICATED,
        ),
        Method(
            "topk",
            "Top-k: of each bucket the largest gradients are all-gathered and summed, with error feedback.",
            "DistributedDataParallel with a communication hook of gsreal.methods.compressed",
            gradients="all-reduce",
            compressor="topk",
            axis="dp_replicate",
            searched=False,
            **_REPLICATED,
        ),
        Method(
            "local_sgd",
            "Local SGD: ranks train apart, and average their parameters every few steps.",
            "gsreal.methods.periodic",
            axis="dp_replicate",
            searched=False,
            **_PERIODIC,
        ),
        Method(
            "diloco",
            "DiLoCo: ranks train apart; every few steps an outer Nesterov step follows their mean change.",
            "gsreal.methods.periodic",
            outer_optimizer="nesterov",
            axis="dp_replicate",
            searched=False,
            **_PERIODIC,
        ),
        Method(
            "streaming_diloco",
            "Streaming DiLoCo: as DiLoCo, but fragment by fragment, whose exchanges overlap with the next steps.",
            "gsreal.methods.periodic",
            outer_optimizer="nesterov",
            in_fragments=True,
            axis="dp_replicate",
            searched=False,
            **_PERIODIC,
        ),
        Method(
            "sparse_loco",
            "SparseLoCo: as DiLoCo, but the largest changes alone are gathered, in two bits, with error feedback.",
            "gsreal.methods.periodic",
            outer_optimizer="sparse",
            axis="dp_replicate",
            searched=False,
            **_PERIODIC,
        ),
        Method(
            "zero2",
            "ZeRO stage 2: gradients are reduce-scattered; parameters stay gathered between forward and backward.",
            "FSDP2, fully_shard(reshard_after_forward=False)",
            parameters="gathered",
            gradients="reduce-scatter",
            optimizer_state="sharded",
            gradient_sync="micro-batch",
            in_pipelines=True,
            programs=EVERYWHERE,
        ),
        Method("zero3", "ZeRO stage 3: parameters, gradients and states are sharded.", "FSDP2", **_FULLY_SHARDED),
        Method("fsdp", "The same as zero3.", "FSDP2", searched=False, **_FULLY_SHARDED),
        Method(
            "hsdp",
            "Hybrid sharding: zero3 inside hosts, replicas across them.",
            "FSDP2 on a two-dimensional mesh",
            two_levels=True,
            **_FULLY_SHARDED,
        ),
        Method(
            "pipeline",
            "Pipeline parallelism: stages of layers on different ranks.",
            "torch.distributed.pipelining",
            gradients="local",
            axis="pp",
            in_pipelines=True,
            programs=("torchtitan",),
            **_REPLICATED,
        ),
        Method(
            "tensor",
            "Tensor parallelism: blocks are cut evenly among ranks.",
            "DTensor",
            gradients="local",
            axis="tp",
            **_REPLICATED,
        ),
        Method(
            "gs",
            "Gradient Sharding: gradients are pushed to the owners of their shards, thresholded if asked.",
            "gsreal.gradient_sharding",
            in_pipelines=True,
            programs=("torchrun",),
            **_PUSHED,
        ),
        Method(
            "gs_z3",
            "Gradient Sharding with parameters sharded at rest.",
            "gsreal.gradient_sharding",
            parameters="sharded",
            gradients="push",
            optimizer_state="sharded",
            gradient_sync="micro-batch",
            in_pipelines=True,
        ),
        Method(
            "gs_wgrad",
            "Gradient Sharding by layers: every rank computes the weight gradients of its own layers alone.",
            "gsreal.methods.gradient_sharding",
            parameters="replicated",
            gradients="local",
            optimizer_state="sharded",
            partition="weight-gradient",
        ),
        Method(
            "gs_tp",
            "Gradient Sharding by slices: blocks are cut among ranks in shares of any size.",
            "gsreal.methods.tensor_slices",
            gradients="local",
            slices="shares",
            axis="tp",
            **_REPLICATED,
        ),
        Method(
            "gs_hier",
            "Gradient Sharding on two levels: gradients are reduced inside hosts and pushed across them.",
            "gsreal.gradient_sharding",
            push_axis="dp_replicate",
            two_levels=True,
            **_PUSHED,
        ),
    )
}

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]

PREDICTED_ONLY: dict[tuple[str, object], str] = {
    ("workload.precision", "fp16"): "can be predicted, but not run without loss scaling: set workload.loss_scale",
    ("workload.map_precision", "fp8"): "can be predicted, but not run; leave it out",
    ("workload.autocast", "fp16"): "can be predicted, but not run without loss scaling: set workload.loss_scale",
    ("workload.optimizer_state_precision", "8-bit"): "can be predicted, but not run; leave it out",
    ("workload.optimizer_state_precision", "4-bit"): "can be predicted, but not run; leave it out",
    ("workload.fused_loss", True): "can be predicted, but not run; leave it out",
    **{
        ("workload.frozen_precision", each): "can be predicted, but not run; leave it out"
        for each in ("nf4", "nf4-double", "int8")
    },
    ("workload.gradient_precision", "fp32"): "can be predicted, but not run; leave it out",
    ("run.extrapolate_micro_batches", True): "a real run has all micro-batches; allowed: false",
    ("plan.zero1_implementation", "deepspeed"): "can be predicted, but not run; allowed: 'torch'",
    ("plan.zero1_implementation", "megatron"): "can be predicted, but not run; allowed: 'torch'",
    ("plan.zero2_implementation", "deepspeed"): "can be predicted, but not run; allowed: 'torch'",
    ("plan.offload", "optimizer"): "can be predicted, but not run: PyTorch has none; allowed: 'parameters'",
    ("plan.gathered_inputs", "gathered-again"): "can be predicted, but not run; allowed: 'kept'",
    ("plan.receive_buffers", "in-flight"): "can be predicted, but not run; allowed: 'micro-batch'",
    # on nccl exchanges are predicted as parts of the products' own kernels (Transformer Engine's userbuffers, torch's
    # symmetric memory), which real runs do not have
    ("plan.tp_overlap", True): "can be predicted, but is run with cluster.backend = 'gloo' only; allowed: false",
}
"""Values of a scenario's keys that a real run refuses, and why."""
RUNS_WITH: dict[tuple[str, object], tuple[str, tuple[object, ...]]] = {
    ("workload.precision", "fp16"): ("workload.loss_scale", ()),
    ("workload.autocast", "fp16"): ("workload.loss_scale", ()),
    ("plan.tp_overlap", True): ("cluster.backend", ("gloo",)),
}
"""For some of `PREDICTED_ONLY`: another key, and the values of it with which a real run accepts the value after all;
without values, any value that is given."""
