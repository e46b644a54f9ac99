"""Readers of the tables by which papers on planners are validated: AMP, Sailor and vTrain.

AMP: GPT-2 medium on 16 GPUs, four to a machine: all T4, or in the experiment `het_cluster` three machines of V100 and a
last one of T4. A row gives the plan and the stages; the rest is from the paper (Li et al. 2022, "AMP: Automatically
Finding Model Parallel Strategies with Heterogeneity Awareness", section 5) and its code (src/het_cluster.py), and from
DeepSpeed's pipelined GPT-2. `het_model` trains the generator of a TransGAN on four machines of V100 (src/het_model.py,
examples/ds_pretrain_transgan_pipe.sh, megatron/model/trans_gan_gen.py): twelve wide blocks on the 81 places of a first
image, then twelve narrow ones within the 256 windows of the last one, nothing recomputed. That its machines are
P3.8xlarge follows from the rates that its script gives them.

Sailor: plans that name the GPUs of every stage and replica, run by its own copy of DeepSpeed's PipelineEngine.

vTrain: GPT plans on A100 of 80 GB by Megatron-DeepSpeed, fp16, full recomputation. Whether DeepSpeed's engine updates
parameters, and with which ds_config, is not told: passes that clip and unscale gradients are not counted.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, pairwise

from analysis.literature.platforms import Server, sixteen_bits_of
from analysis.literature.runs import (
    MEGATRON_MESSAGE_CALLS,
    Run,
    Shape,
    SkippedError,
    Software,
    UnscoredError,
    Windows,
    gpt,
)
from analysis.literature.tables.fields import method_of, micro_batches_of, needed, padded, positive

AMP_RANKS, AMP_MACHINE = 16, 4
AMP_SERVERS: dict[str, tuple[Server, ...]] = {
    "homogeneous": (("T4", AMP_MACHINE),) * 4,
    "het_model": (("V100-16-AWS", AMP_MACHINE),) * 4,
    "het_cluster": (*((("V100-16-AWS", AMP_MACHINE),) * 3), ("T4", AMP_MACHINE)),
}
"""Servers by experiment, in rank order (src/het_cluster.py: three P3.8xlarge and a G4dn.12xlarge, the last one)."""
AMP_LAYERS, AMP_HIDDEN, AMP_HEADS, AMP_SEQUENCE = 24, 1024, 16, 1024
AMP_GLOBAL_BATCH = {"homogeneous": 32, "het_cluster": 32, "het_model": 64}
AMP_VOCABULARY = 50257
AMP_BEFORE, AMP_AFTER = 2, 4
"""Layers of DeepSpeed's pipeline before the blocks (embedding, transposition) and after them (transposition, norm,
logits, loss)."""
TRANSGAN_LAYERS = 56
TRANSGAN_BLOCKS = (range(3, 15), range(41, 53))
"""Places of the wide and of the narrow blocks among the layers of DeepSpeed's pipeline."""
TRANSGAN = Shape(
    kind="gpt", layers=24, hidden=1024, heads=4, kv_heads=4, ffn=4096, sequence_length=81, tied=False,
    # the map of 512 latent variables to the first image has as many parameters as an embedding of
    vocabulary=512 * 81,
    windows=Windows(
        shape=Shape(
            kind="gpt", layers=12, hidden=16, heads=4, kv_heads=4, ffn=64, vocabulary=1, sequence_length=18**2
        ),
        count=(9 * 32 // 18) ** 2,
    ),
)  # fmt: skip


def amp(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or another experiment."""
    if record["experiment"] not in AMP_SERVERS:
        raise SkippedError(f"the experiment '{record['experiment']}' is not known")
    servers = AMP_SERVERS[record["experiment"]]
    dp, tp, pp = (needed(record, key) for key in ("dp", "tp", "pp"))
    micro = needed(record, "micro_batch")
    if dp * tp * pp != AMP_RANKS:
        raise SkippedError("dp x tp x pp are not the 16 GPUs")
    step_s = positive(record, "measured_iter_s")
    generator = record["experiment"] == "het_model"
    blocks = _blocks_of_partition(record["partition"], pp, generator=generator)
    devices: dict[str, int] = {}
    for gpu, count in servers:
        devices[gpu] = devices.get(gpu, 0) + count
    gpus = " and ".join(f"{count} {gpu}" for gpu, count in devices.items())
    run = Run(
        identity=identity,
        source=f"AMP, {'TransGAN' if generator else 'GPT-2 medium'} on {gpus}",
        gpu=servers[0][0],
        per_node=AMP_MACHINE,
        servers=servers if len(set(servers)) > 1 else (),
        shape=TRANSGAN
        if generator
        else gpt(
            layers=AMP_LAYERS,
            hidden=AMP_HIDDEN,
            heads=AMP_HEADS,
            vocabulary=padded(AMP_VOCABULARY, tp),
            sequence_length=AMP_SEQUENCE,
        ),
        software=Software(
            precision=sixteen_bits_of(servers[0][0]),
            early_stop=False,
            dropout=not generator,
            fused_softmax=not generator,
            partitioned=tp > 1 and pp > 1 and not generator,
            in_place_loss=True,
        ),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=blocks if pp > 1 else None,
        micro_batch=micro,
        micro_batches=micro_batches_of(AMP_GLOBAL_BATCH[record["experiment"]], dp, micro),
        recompute="none" if generator else "full",
        overlap=False,
        clip_norm=1.0,  # gradient_clipping and fp16 of examples/ds_config.json
        scales_loss=True,
        step_s=step_s,
    )
    if step_s is None:
        raise UnscoredError("the row has no time (inf: it did not fit)", run)
    return run


def _blocks_of_partition(partition: str, pp: int, *, generator: bool = False) -> tuple[int, ...]:
    """Return the number of blocks of each stage; the partition's bounds also count DeepSpeed's other layers.

    >>> _blocks_of_partition("[0, 15, 30]", 2)
    (13, 11)
    >>> _blocks_of_partition("[0, 12, 44, 49, 56]", 4, generator=True)
    (9, 6, 5, 4)
    """
    layers = TRANSGAN_LAYERS if generator else AMP_LAYERS + AMP_BEFORE + AMP_AFTER
    places = TRANSGAN_BLOCKS if generator else (range(AMP_BEFORE, AMP_BEFORE + AMP_LAYERS),)
    try:
        bounds = [int(each) for each in partition.strip("[] ").split(",")]
    except ValueError:
        raise SkippedError("a partition that cannot be read") from None
    if len(bounds) != pp + 1 or (bounds[0], bounds[-1]) != (0, layers):
        raise SkippedError("a partition of another model, or into other stages than pp")
    inside = [sum(min(max(bound - each.start, 0), len(each)) for each in places) for bound in bounds]
    blocks = tuple(end - start for start, end in pairwise(inside))
    if min(blocks) < 0:
        raise SkippedError("a partition that cannot be read")
    return blocks


# Sailor ---------------------------------------------------------------------------------------------------------------

SAILOR_SEQUENCE = 2048
SAILOR_RECOMPUTED = ("mit",)
"""Clusters, of GPUs with little memory, on which blocks are recomputed."""
SAILOR_SENDER_CALLS = 7
"""Calls for a message between stages that reach the device or a peer (deepspeed/pipe_engine.py): a copy of the tensor
rank's part, its description, an empty tensor in the output's place; for both, a send and a wait."""
SAILOR_RECEIVER_CALLS = 15
"""The same on the receiver: for part and description, a receive, a wait and two copies; the description to the host,
twice; zeros to the device, the part into them, the gather over the tensor ranks, a wait, and a copy of the result
(deepspeed/utils.py, reconstruct_tensor)."""
SAILOR_HOST_PASSES = 3
"""The receiver makes a tensor of zeros of the whole message on the host, for each message: the system clears new pages,
one thread fills them (torchrun gives a rank no more), and they are copied to the device."""
SAILOR_MODELS = {
    "OPT-350": replace(
        gpt(layers=24, hidden=1024, heads=16, vocabulary=50272, sequence_length=SAILOR_SEQUENCE), rectified=True
    ),
    "GPT-Neo-2.7": gpt(layers=32, hidden=2560, heads=20, vocabulary=50257, sequence_length=SAILOR_SEQUENCE),
    "OPT-30": replace(
        gpt(layers=48, hidden=7168, heads=56, vocabulary=50272, sequence_length=SAILOR_SEQUENCE), rectified=True
    ),
    "LLAMA-3-8": Shape(
        kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256,
        sequence_length=SAILOR_SEQUENCE,
    ),
}  # fmt: skip
"""Zhang et al. 2022, OPT, table 1; EleutherAI's GPT-Neo 2.7B; Llama 3 8B. Sequences and widths agree with Sailor's own
tables of layers, where vocabularies are padded as Megatron does. OPT's activation is ReLU (Sailor's Megatron-DeepSpeed,
megatron/model/opt_model.py)."""


def sailor(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or stages that are split differently."""
    if record["model"] not in SAILOR_MODELS:
        raise SkippedError(f"the model {record['model']} is not known")
    servers, tp, pp, dp = _stages(record["stages"])
    gpus = " and ".join(dict(servers))
    micro, layers = needed(record, "mbs"), _blocks_of_layers(record["layers_per_stage"], pp)
    shape = SAILOR_MODELS[record["model"]]
    if sum(layers) != shape.layers:
        raise SkippedError("stages of another number of layers")
    return Run(
        identity=identity,
        source=f"Sailor validation, {record['model']} on {gpus}",
        gpu=gpus,
        per_node=servers[0][1],
        servers=servers if len(set(servers)) > 1 else (),
        shape=replace(shape, vocabulary=padded(shape.vocabulary, tp)),
        software=Software(
            precision="fp32",
            tensor_float=True,
            dropout=False,
            fused_softmax=False,
            early_stop=False,
            in_place_loss=True,
            partitioned=tp > 1 and pp > 1,
            serial_messages=True,
            receives_in_flight=True,
            message_calls=SAILOR_SENDER_CALLS,
            unpacking_calls=SAILOR_RECEIVER_CALLS,
            host_passes=SAILOR_HOST_PASSES,
        ),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=layers if pp > 1 else None,
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "gbs"), dp, micro),
        # inferred from the memory of two rows: less than the saved scores alone would take
        recompute="full" if record["cluster"] in SAILOR_RECOMPUTED else "none",
        overlap=False,
        step_s=positive(record, "measured_iter_s"),
        memory_bytes=positive(record, "measured_max_mem_bytes"),
        memory_metric="device",
        sums_tied_gradients=False,  # its last stage has a weight of its own (Sailor's table of layers)
    )


def _stages(text: str) -> tuple[tuple[Server, ...], int, int, int]:
    """Return servers in rank order, tp, pp and dp; raise SkippedError where stages differ in tp or dp.

    >>> _stages("A100-40x2:tp2|V100-16x4:tp2;V100-16x4:tp2|V100-16x4:tp2")
    ((('A100-40', 2), ('V100-16', 4), ('V100-16', 2)), 2, 2, 2)
    """
    stages = [stage.split("|") for stage in text.split(";")]
    replicas = [replica.strip() for stage in stages for replica in stage]
    matches = [re.fullmatch(r"(.+)x([1-9]\d{0,3}):tp([1-9]\d{0,3})", replica) for replica in replicas]
    if None in matches:
        raise SkippedError("stages that cannot be read")
    parsed = [(match.group(1), int(match.group(2)), int(match.group(3))) for match in matches if match]
    tensor_ranks, replica_counts = {tp for _, _, tp in parsed}, {len(stage) for stage in stages}
    if len(tensor_ranks) > 1:
        raise SkippedError("replicas with unequal numbers of tensor ranks")
    if len(replica_counts) > 1:
        raise SkippedError("stages with unequal numbers of replicas")
    (tp,) = tensor_ranks
    servers: list[Server] = []
    for (gpu, devices), same in groupby(parsed, key=lambda replica: replica[:2]):
        ranks = tp * len(list(same))
        servers += [(gpu, devices)] * (ranks // devices) + ([(gpu, ranks % devices)] if ranks % devices else [])
    return tuple(servers), tp, len(stages), len(stages[0])


def _blocks_of_layers(text: str, pp: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, without the embedding and the head.

    >>> _blocks_of_layers("5/7/7/7", 4)
    (4, 7, 7, 6)
    """
    try:
        layers = [int(each) for each in text.split("/")]
    except ValueError:
        raise SkippedError("stages that cannot be read") from None
    layers[0] -= 1  # the embedding
    layers[-1] -= 1  # the head
    if len(layers) != pp or min(layers) < 0:
        raise SkippedError("stages that cannot be read")
    return tuple(layers)


# vTrain ---------------------------------------------------------------------------------------------------------------

VTRAIN_GPU = "A100-SXM-80GB, 4 cards"
VTRAIN_NODE = 8
VTRAIN_VOCABULARY = 50257
"""That of vTrain's configurations (src/config.py, `vocab_size`), which Megatron pads; the tables do not state it."""


def vtrain(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing or contradictory fields."""
    dp, micro = needed(record, "data parallelism"), needed(record, "micro batch")
    hidden, heads = needed(record, "hidden size"), needed(record, "attention heads")
    pp, milliseconds = needed(record, "pipeline parallelism"), positive(record, "iteration time (ms)")
    tp, ranks = needed(record, "tensor parallelism"), needed(record, "# GPUs")
    if dp * tp * pp != ranks:
        raise SkippedError("dp x tp x pp are not the GPUs")
    shape = gpt(
        layers=needed(record, "# layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=padded(VTRAIN_VOCABULARY, tp),
        sequence_length=needed(record, "sequence length"),
    )
    return Run(
        identity=identity,
        source=f"vTrain, {'several nodes' if ranks > VTRAIN_NODE else 'one node'}",
        gpu=VTRAIN_GPU,
        per_node=8,
        shape=shape,
        software=Software(
            early_stop=False,
            partitioned=tp > 1 and pp > 1,
            in_place_loss=True,
            # the kernel takes scores of a multiple of four heads of samples (Megatron-LM, megatron/model/
            # fused_softmax.py, is_kernel_available)
            fused_softmax=micro * heads // tp % 4 == 0,
            float_softmax=True,
            receives_in_flight=True,
            message_calls=MEGATRON_MESSAGE_CALLS,
        ),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "global batch"), dp, micro),
        recompute="full",
        overlap=False,
        step_s=milliseconds / 1e3 if milliseconds else None,
    )
