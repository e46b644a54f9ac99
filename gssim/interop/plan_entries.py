"""The plan of an imported scenario: the method and its axes, the stages, the batch, and what the program overlaps.

Each entry has the key from which it was read. What the file leaves open has a default, which is marked as such.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gssim.cluster import Cluster
from gssim.interop.reading import Keys, Value
from gssim.interop.training import Entry, Training
from gssim.plan import METHODS
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.scenario.vocabulary_slices import (
    shares_embedding,
    undivided_embedding_reason,
    undivided_loss_reason,
)
from gssim.units import PRECISION_BYTES, Precision, counted
from gssim.workload import Model, unrolled

BATCH = "workload.global_batch_size"
COPIED_GRADIENTS = (
    "approximated: gradients are copied into buckets that exist beside them, as by torch; Megatron-LM's are these "
    "buckets alone, and DeepSpeed copies 5e8 elements at a time"
)
MEGATRON_BUCKET_PARAMETERS, MEGATRON_RANK_PARAMETERS = 40_000_000, 1_000_000
"""Least number of parameters in Megatron-LM's buckets; and parameters per data-parallel rank, which count instead if
that is more (core/distributed/distributed_data_parallel.py)."""
ONE_BUCKET = "1024 TiB"
"""Larger than all gradients together, so that they are reduced in one message after the backward."""


@dataclass(frozen=True)
class _Job:
    """A training as a file describes it, with the model and the cluster that it is to run on."""

    training: Training
    keys: Keys
    """The file's keys, in which contradictions are refused and approximations are listed."""
    model: Model
    cluster: Cluster
    overrides: dict[str, Any]
    """The values of --set by key, which replace those of the file."""

    @property
    def precision(self) -> Precision:
        """The precision of the weights."""
        asked: Precision | None = self.overrides.get("workload.precision")
        return asked or (self.training.precision.value if self.training.precision else "fp32")

    @property
    def divides_sequences(self) -> bool:
        """Whether tensor-parallel ranks divide sequences."""
        parallel = self.training.sequence_parallel
        return bool(self.overrides.get("plan.sequence_parallel", parallel is not None and parallel.value))


def plan_entries(
    training: Training, keys: Keys, model: Model, cluster: Cluster, overrides: dict[str, Any]
) -> list[Entry]:
    """Return the entries of the batch and of the plan; contradictions with the cluster are refused in `keys`."""
    job = _Job(training, keys, model, cluster, overrides)
    sizes = _axes(job)
    if sizes is None:
        return []
    ranks, dp, tp, pp, entries = sizes
    method = next(entry.value for entry in entries if entry.key == "plan.method")
    if not METHODS[method].can_replicate:
        training.reduce_precision = None  # nothing is reduced
    else:
        _reduce_divided_sequences(job)
    if tp.value > 1 and method != "single":
        entries.append(Entry.of("plan.tp", tp))
    if pp.value > 1:
        entries.append(Entry.of("plan.pp", pp))
        entries += pipeline_entries(training, keys, model, pp.value)
        if training.receive_buffers is not None:
            entries.append(Entry.of("plan.receive_buffers", training.receive_buffers))
    asked = overrides.get("plan.method", method)
    if asked in ("zero1", "zero2") and training.sharding is not None:
        entries += _zero_implementation(job, asked, training.sharding, tp.value, pp.value)
    if asked == "ddp" and training.zero1_implementation != "torch":
        keys.listed.append((entries[0].comment, COPIED_GRADIENTS))
    batch = _batch(job, dp, pp.value)
    _shorten(training, entries, batch, pp.value)
    accumulates = any(entry.key == "plan.micro_batches" and entry.value > 1 for entry in batch)
    entries += _options(job, method, tp.value, pp.value, accumulates=accumulates)
    entries += _input_gradients(job, tp)
    entries += _megatron_bucket(job, asked, dp, model.elements // (tp.value * pp.value))
    entries += _gathers_beside_forward(job, asked)
    if not overrides.get("plan.sequence_parallel", True):
        entries = [entry for entry in entries if entry.key not in ("plan.gathered_inputs", "plan.tp_overlap")]
    entries += [*_offload(job), *_vocabulary(job, tp.value)]
    if ranks < len(cluster.devices) and method != "single":
        origin = training.world.origin if training.world else "what the file says"
        entries.append(Entry("plan.ranks", ranks, f"{origin}; the cluster has {len(cluster.devices)} devices"))
    return [*batch, *entries]


def _reduce_divided_sequences(job: _Job) -> None:
    """Set the precision in which DeepSpeed reduces gradients where ranks divide sequences, by a key of its own.

    Source: DeepSpeed, runtime/engine.py: seq_parallel_communication_data_type.
    """
    training, keys = job.training, job.keys
    cp, asked = training.cp, training.divided_reduce_precision
    is_divided = cp is not None and job.overrides.get("plan.cp", cp.value) > 1
    is_engine = training.zero1_implementation == "deepspeed"
    if asked is not None and not (is_engine and is_divided):
        keys.note(asked.key, "no effect, as no sequence is divided")
    if not is_engine or cp is None or not is_divided or job.precision == "fp32":
        return
    precision = asked or Value("fp32", f"{cp.origin}: seq_parallel_communication_data_type is not given: fp32")
    given = training.reduce_precision
    if given is not None and given.value != precision.value:
        keys.note(given.key, f"no effect beside divided sequences, whose gradients are reduced in {precision.value}")
    training.reduce_precision = precision if precision.value != job.precision else None


def _zero_implementation(job: _Job, method: str, sharding: Value, tp: int, pp: int) -> list[Entry]:
    """Return the entries for the implementation of ZeRO-1 or ZeRO-2, unless it is torch's, and for its buckets."""
    training = job.training
    implementation, sequences = training.zero1_implementation, training.sequence_parallel
    if implementation == "torch" or (implementation == "megatron" and method == "zero2"):
        return []
    entry = Entry(f"plan.{method}_implementation", implementation, sharding.origin)
    if implementation == "megatron":
        return [entry]
    instead = "broadcasts of parameters, not gathers"
    several = {"sequence parallelism": tp > 1 and sequences is not None and sequences.value}
    if method == "zero2":
        instead = "parameters are gathered and gradients reduce-scattered in every micro-batch, as FSDP2 does"
        several |= {"pipelines": pp > 1, "divided experts": training.ep is not None and training.ep.value > 1}
    beside = next((name for name, is_there in several.items() if is_there), None)
    if beside is not None:
        job.keys.note(sharding.key, f"approximated beside {beside}: {instead}")
        return []
    elements = training.bucket_elements
    if elements is None or (pp > 1 and training.gradient_precision is not None):  # which stages reduce by themselves
        return [entry]
    size_bytes = elements.value * PRECISION_BYTES[job.precision]
    return [entry, Entry("plan.bucket_bytes", size_bytes, elements.origin)]


def _megatron_bucket(job: _Job, method: str, dp: int, elements: int) -> list[Entry]:
    """Return the size of Megatron-LM's gradient buckets, if it has any; without overlap it has a single bucket.

    `elements`: number of a rank's parameters, where stages and slices are taken for equal. Later stages of a pipeline
    have one bucket in any case, which is not modelled.
    """
    training, parameters = job.training, job.training.bucket_parameters
    if parameters is None or method not in ("ddp", "zero1"):
        return []
    if training.overlap is not None and not training.overlap.value:
        return [Entry("plan.bucket_bytes", ONE_BUCKET, f"{training.overlap.origin}: one bucket, after the backward")]
    count = parameters.value or max(MEGATRON_BUCKET_PARAMETERS, MEGATRON_RANK_PARAMETERS * dp)
    origin = parameters.origin
    if training.bucket_count is not None:
        count, origin = max(1, elements // training.bucket_count.value), training.bucket_count.origin
    size_bytes = count * PRECISION_BYTES[job.precision]
    return [Entry("plan.bucket_bytes", size_bytes, f"{origin}: {count} parameters")]


def _gathers_beside_forward(job: _Job, method: str) -> list[Entry]:
    """Return the entry for gathers of updated parameters beside the next forward; note why they are not."""
    training, overrides = job.training, job.overrides
    asked = training.gathers_beside_forward
    if asked is None:
        return []
    optimizer = overrides.get("workload.optimizer", training.optimizer.value if training.optimizer else "")
    overlaps = overrides.get("plan.overlap", training.overlap is not None and training.overlap.value)
    gathers = method == "zero1" and overrides.get("plan.zero1_implementation", "megatron") == "megatron"
    reasons = {
        "the shards are those of the method, which gathers without it": not gathers or not overlaps,
        "approximated: beside Muon matrices are gathered after the update": optimizer == "muon",
        "of no effect on this cluster, whose backend is gloo": job.cluster.backend != "nccl",
    }
    reason = next((text for text, is_so in reasons.items() if is_so), None)
    if reason is not None:
        job.keys.note(asked.key, reason)
        return []
    return [Entry.of("plan.publish.overlap", asked)]


def _shorten(training: Training, entries: list[Entry], batch: list[Entry], pp: int) -> None:
    """Rename a schedule of fewer micro-batches than stages: all forwards come first, as in gpipe."""
    many = next((entry.value for entry in batch if entry.key == "plan.micro_batches"), pp)
    for position, entry in enumerate(entries):
        if entry.key == "plan.schedule" and entry.value == "1f1b" and many < pp and training.short_schedules:
            comment = f"{entry.comment}; {many} micro-batches in {pp} stages run as in gpipe"
            entries[position] = Entry(entry.key, "gpipe", comment)


def _offload(job: _Job) -> list[Entry]:
    """Return the entry of state kept in host memory; refuse it if the cluster does not describe that memory."""
    offload, cluster = job.training.offload, job.cluster
    if offload is None:
        return []
    if cluster.host is None:
        unknown = f"the cluster '{cluster.name}' does not say what its hosts' memory holds"
        tables = (
            "the table 'host' (memory_bytes, memory_bandwidth_bytes_per_s, source) and host_memory = true of servers"
        )
        reason = f"{unknown}: add {tables}, as scenarios/clusters/dgx-h100.toml has them, or --ignore the key"
        job.keys.refuse_value(offload, reason, "plan.offload", "cluster.host")
        if "cluster.host" not in job.keys.overridden:  # ignored, replaced, or nothing is written
            return []
    return [Entry.of("plan.offload", offload)]


def _vocabulary(job: _Job, tp: int) -> list[Entry]:
    """Return the entries of a vocabulary divided among tensor-parallel ranks, if this model's can be divided here."""
    training, model = job.training, job.model
    whole = {
        "embedding_parallel": (training.embedding_parallel, undivided_embedding_reason, "the token embedding of"),
        "loss_parallel": (training.loss_parallel, undivided_loss_reason, "the loss of"),
    }
    asked = {key: value for key, (value, _, _) in whole.items() if value is not None and value.value and tp > 1}
    divided = {key: value for key, value in asked.items() if whole[key][1](model) is None}
    if len(divided) == 1 and shares_embedding(model):
        divided = {}
    for key in (key for key in asked if key not in divided):
        what = f"approximated: {whole[key][2]} tensor-parallel ranks is whole"
        job.keys.listed.append((asked[key].origin, what))
    return [Entry(f"plan.{key}", True, value.origin) for key, value in divided.items()]


def _options(job: _Job, method: str, tp: int, pp: int, *, accumulates: bool) -> list[Entry]:
    """Return the entries of recomputation, synchronization, buckets and overlap."""
    training = job.training
    entries = []
    recompute, sync = training.recompute, training.gradient_sync
    if recompute is not None:
        entries.append(Entry.of("plan.recompute", recompute))
    else:
        entries.append(Entry("plan.recompute", "none", "as the file does not say: the user's code decides", True))
    rules = METHODS[method]
    differs = sync is not None and sync.value != rules.gradient_sync
    if sync is not None and differs and pp == 1 and accumulates and rules.gradients == "reduce-scatter":
        entries.append(Entry.of("plan.gradient_sync", sync))
    buckets = training.bucket_bytes
    if buckets is not None:
        if method == "ddp" and pp == 1:
            entries.append(Entry.of("plan.bucket_bytes", buckets))
        else:
            job.keys.note(buckets.key, f"method '{method}' has no buckets of this size here")
    if training.overlap is not None and training.overlap.value is False:
        entries.append(Entry("plan.overlap", False, training.overlap.origin))
    if training.sequence_parallel is not None and training.sequence_parallel.value and tp > 1:
        entries.append(Entry("plan.sequence_parallel", True, training.sequence_parallel.origin))
        if training.gathered_inputs is not None:
            entries.append(Entry.of("plan.gathered_inputs", training.gathered_inputs))
        if training.tp_overlap is not None and training.tp_overlap.value:
            entries.append(Entry("plan.tp_overlap", True, training.tp_overlap.origin))
    return entries


def _input_gradients(job: _Job, tp: Value) -> list[Entry]:
    """Return the entry for sums of input gradients over tensor-parallel ranks that overlap with products; list that
    there are more sums than Megatron-LM has.

    Its queries, keys and values are one map, and so are gate and up: a block has two all-reduces in the backward. Maps
    of their own, as in Hugging Face's Llama, each have an all-reduce here, as under DTensor. With sequence parallelism
    their common input is gathered once, and its gradient scattered once. Nothing overlaps there: Megatron-LM's
    reduce-scatters and second gathers slow down the products beside them by about as much as they are hidden, and this
    slowdown is not modelled (Korthikanti et al. 2022, table 4).
    """
    training = job.training
    if tp.value == 1 or job.divides_sequences:
        return []
    layers = job.model.sliced_layers or ()
    blocks = [[each.moment.phase for each in layer.reductions] for layer in layers if layer.block]
    most = max((phases.count("b") for phases in blocks), default=0)
    if training.fused_maps and most > 2:
        what = f"approximated: {most} sums of input gradients a block, one a map; Megatron-LM, which fuses these, has 2"
        job.keys.listed.append((tp.origin, what))
    asked = training.async_input_gradients
    return [Entry("plan.async_input_gradients", True, asked.origin)] if asked is not None and asked.value else []


def _axes(job: _Job) -> tuple[int, int, Value, Value, list[Entry]] | None:
    """Return ranks, data-parallel ranks, tp, pp, and the entries of the method and of its own axes."""
    training, keys, cluster, overrides = job.training, job.keys, job.cluster, job.overrides
    devices = len(cluster.devices)
    world = training.world
    ranks: int = overrides.get("plan.ranks") or (world.value if world else devices)
    if ranks > devices:
        if world is not None:
            what = f"{ranks} ranks in all, and the cluster '{cluster.name}' has {devices} devices"
            keys.refuse_value(world, what, "plan.ranks")
        return None
    one = Value(1, "not in the file: 1")
    tp, pp, cp = (
        Value(overrides[key], f"--set {key} = {overrides[key]}")
        if (key := f"plan.{axis}") in overrides
        else given or one
        for axis, given in (("tp", training.tp), ("pp", training.pp), ("cp", training.cp))
    )
    cut = tp.value * pp.value * cp.value
    if ranks % cut:
        blamed = next((axis for axis in (pp, tp) if axis.value > 1), cp)
        product = "tensor times pipeline ranks" if cp.value == 1 else "tensor times pipeline times context ranks"
        keys.refuse_value(blamed, f"{product} are {cut}, which does not divide {ranks} ranks")
        return None
    dp = ranks // cut
    if training.dp is not None and training.dp.value not in (-1, dp):
        keys.refuse_value(training.dp, f"{ranks} ranks of which {cut} share a replica leave {dp}")
        return None
    if pp.value > 1 and training.zero1_implementation == "deepspeed":
        _in_deepspeeds_stages(job)
    entries = _method(job, dp, tp.value, pp.value, cp.value)
    if entries is None:
        return None
    return ranks, dp, tp, pp, [*entries, *_context(job, cp), *_experts(job, tp)]


def _context(job: _Job, cp: Value) -> Iterator[Entry]:
    """Yield the entries of ranks that divide sequences. torch's attention in blocks, where blocks are compiled, waits
    for its exchanges.

    Source: torch 2.6, distributed/_functional_collectives.py, _maybe_wrap_tensor: a traced collective is followed by
    its wait, which inductor does not move (_inductor/config.py, reorder_for_compute_comm_overlap = False).
    """
    if cp.value == 1:
        return
    yield Entry.of("plan.cp", cp)
    training = job.training
    exchange = training.context_exchange or Value("ring", f"{cp.origin}: keys and values in a ring")
    if exchange.value != "all-to-all":
        yield Entry.of("plan.context_exchange", exchange)
    if job.overrides.get("plan.context_exchange", exchange.value) == "all-to-all":
        return
    if training.context_split is not None:
        yield Entry.of("plan.context_split", training.context_split)
    if training.compiled is not None and training.compiled.value:
        yield Entry("plan.context_overlap", False, f"{training.compiled.origin}: compiled blocks wait for exchanges")


def _in_deepspeeds_stages(job: _Job) -> None:
    """Set what differs in DeepSpeed's pipelines: BF16_Optimizer, and reductions that overlap with nothing.

    Source: DeepSpeed, runtime/engine.py, _configure_zero_optimizer; runtime/pipe/engine.py, _exec_reduce_grads.
    """
    training, keys = job.training, job.keys
    overlap, whole = training.overlap, training.sharding is None or training.sharding.value == "none"
    in_stages = training.sharding_in_stages
    if in_stages is not None and (whole or training.sharding is in_stages):
        training.sharding = in_stages
        # runtime/bf16_optimizer.py adds gradients up in fp32, and sums these over replicas, in 5e8 elements at a time
        in_fp32 = Value("fp32", in_stages.origin)
        training.gradient_precision, training.reduce_precision = in_fp32, training.reduce_precision or in_fp32
        keys.listed.append((in_stages.origin, COPIED_GRADIENTS))
    if overlap is not None and overlap.value:
        training.overlap = Value(False, f"{overlap.origin}: of no effect in a pipeline")


def _experts(job: _Job, tp: Value) -> Iterator[Entry]:
    """Yield the entries of divided experts; refuse experts that tensor ranks cut too."""
    training = job.training
    if training.ep is None or training.ep.value == 1:
        return
    yield Entry.of("plan.ep", training.ep)
    if tp.value == 1:
        return
    etp = training.etp or Value(tp.value, f"{tp.origin}: experts are cut among as many")
    if etp.value != 1:
        unsaid = " (expert-tensor-parallel-size, by default as many)" if training.etp is None else ""
        why = f"experts that tensor ranks cut too cannot be simulated; allowed: 1{unsaid}"
        job.keys.refuse_value(etp, why, "plan.etp")
    yield Entry.of("plan.etp", etp)


def _method(job: _Job, dp: int, tp: int, pp: int, cp: int) -> list[Entry] | None:
    """Return entries of the method and of the data axes that it sets; state is sharded over `cp` ranks too."""
    training = job.training
    sharding = training.sharding or Value("none", "not in the file: no sharding")
    split = _data_axes(job, dp, sharding)
    if split is None:
        return None
    replicas, shards = split
    if dp * cp == 1 or sharding.value == "none" or (shards * cp == 1 and sharding.value != "zero1"):
        why = sharding.origin if sharding.value == "none" else f"{sharding.origin}, but one rank has nothing to share"
        method = "ddp" if dp * cp > 1 else "pipeline" if pp > 1 else "tensor" if tp > 1 else "single"
        return [Entry("plan.method", method, why)]
    method = "hsdp" if sharding.value == "zero3" and replicas > 1 else sharding.value
    if pp > 1 and not METHODS[method].in_pipelines:
        job.keys.refuse_value(sharding, f"method '{method}' cannot run in a pipeline yet", "plan.method")
        return None
    entries = [Entry("plan.method", method, sharding.origin)]
    if replicas > 1 and method != "zero1":
        for name, size in (("dp_replicate", replicas), ("dp_shard", shards)):
            value: Value | None = getattr(training, name)
            entries.append(Entry(f"plan.{name}", size, value.origin if value else "the rest of the ranks"))
    return entries


def _data_axes(job: _Job, dp: int, sharding: Value) -> tuple[int, int] | None:
    """Return the sizes of dp_replicate and dp_shard; one of them may be all remaining ranks."""
    replicate, shard = job.training.dp_replicate, job.training.dp_shard
    replicas = replicate.value if replicate else -1
    shards = shard.value if shard else -1
    if replicas == -1 and shards == -1:
        replicas = 1 if sharding.value != "none" else dp
    for mine, other in ((replicas, shards), (shards, replicas)):
        if mine == -1 and (other < 1 or dp % other):
            blamed = shard or replicate
            if blamed is not None:
                job.keys.refuse_value(blamed, f"does not divide the {dp} data-parallel ranks")
            return None
    replicas = dp // shards if replicas == -1 else replicas
    shards = dp // replicas if shards == -1 else shards
    if replicas * shards != dp:
        blamed = shard or replicate
        if blamed is not None:
            job.keys.refuse_value(
                blamed, f"replicas times shards are {replicas * shards}, the data-parallel ranks {dp}"
            )
        return None
    return replicas, shards


def _batch(job: _Job, dp: int, pp: int) -> list[Entry]:
    """Return the entries of the global batch and of the micro-batches; see `Training`.

    global = micro-batch * accumulation * data-parallel ranks; any two of these determine the third.
    """
    training, keys, overrides = job.training, job.keys, job.overrides
    micro, many, total = training.micro_batch, training.accumulation, training.global_batch
    if "workload.global_batch_size" in overrides:
        total = Value(overrides["workload.global_batch_size"], "--set workload.global_batch_size")
    if "plan.micro_batches" in overrides:
        many = Value(overrides["plan.micro_batches"], "--set plan.micro_batches")
        micro = micro if total is None else None
    one = Value(1, "one sample a micro-batch, as the file does not say")
    open_keys = set()
    if total is None:
        if micro is None or many is None:
            open_keys = {"plan.micro_batches", BATCH}
        micro, many = micro or one, many or Value(1, "no accumulation, as the file does not say")
        origin = f"{micro.origin}; {many.origin}; on {dp} data-parallel ranks"
        total = Value(micro.value * many.value * dp, origin)
    else:
        known = micro or many or one
        if known is one:
            open_keys = {"plan.micro_batches"}
        share = known.value * dp
        if not isinstance(total.value, int) or total.value % share:
            keys.refuse_value(total, f"is no multiple of {share}: {known.origin} on {dp} ranks", BATCH)
            return []
        rest = Value(total.value // share, f"{total.origin}; {known.origin}; {dp} data-parallel ranks")
        micro, many = (rest, many) if micro is None and many is not None else (known, many or rest)
    if total.value != micro.value * many.value * dp:
        reason = (
            f"{counted(micro.value, 'sample')} times {many.value} micro-batches times {dp} data-parallel ranks are "
        )
        keys.refuse_value(total, f"{reason}{micro.value * many.value * dp}", BATCH)
        return []
    pieces = _pieces(job, micro, many, pp)
    return [
        Entry(BATCH, total.value, total.origin, BATCH in open_keys),
        Entry("plan.micro_batches", pieces.value, pieces.origin, "plan.micro_batches" in open_keys),
    ]


def _pieces(job: _Job, micro: Value, many: Value, pp: int) -> Value:
    """Return the number of micro-batches: `many` (steps of gradient accumulation), or, in a pipeline whose file states
    the size of its micro-batches, the number of these in a batch of `micro` samples.
    """
    piece, keys = job.training.pipeline_micro_batch, job.keys
    if piece is None or pp == 1:
        return many
    if many.value > 1:
        keys.refuse_value(
            many, "a pipeline that is run several times for one update cannot be simulated; allowed: once"
        )
    elif micro.value % piece.value:
        keys.refuse_value(piece, f"does not divide the {counted(micro.value, 'sample')} of {micro.origin}")
    return Value(micro.value // piece.value, f"{micro.origin} in parts of {piece.origin}")


def pipeline_entries(training: Training, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    """Return the entries of a pipeline's schedule and of its stages, where they are not the usual ones."""
    schedule, per_rank = training.schedule, training.stages_per_rank
    entries = [Entry.of("plan.schedule", schedule)] if schedule is not None else []
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    if training.stage_modules is not None:
        return [*entries, *_named_stages(training.stage_modules, keys, model, ranks)]
    if training.ends_in_blocks is not None:
        return [*entries, *_weighted_stages(training, keys, model, ranks)]
    if training.blocks_per_stage is not None:
        of = training.blocks_per_stage
        if len(blocks) % (of.value * ranks):
            keys.refuse_value(
                of, f"stages of {of.value} blocks on {ranks} ranks do not divide the {len(blocks)} blocks"
            )
            return []
        per_rank = Value(len(blocks) // (of.value * ranks), of.origin)
    count = ranks * (per_rank.value if per_rank is not None else 1)
    if not training.even_stages and (per_rank is None or per_rank.value <= 2):
        return entries
    stages = [len(blocks) // count] * count
    first, last = training.first_stage_blocks, training.last_stage_blocks
    if first is not None or last is not None:
        ends = [end for end in (first, last) if end is not None]
        rest, inner = len(blocks) - sum(end.value for end in ends), count - len(ends)
        stages = [rest // inner if inner > 0 else 0] * count
        stages[0] = first.value if first is not None else stages[0]
        stages[-1] = last.value if last is not None else stages[-1]
    origin = ", ".join(each.origin for each in (per_rank, first, last, training.pp) if each is not None)
    if sum(stages) != len(blocks) or min(stages) < 1:
        blamed = first or last or per_rank or training.pp
        if blamed is not None:
            keys.refuse_value(
                blamed, f"the {len(blocks)} blocks of '{model.name}' do not divide so among {count} stages"
            )
        return []
    return [*entries, Entry("plan.stages", _with_ends(stages, model), f"{origin}: as many blocks each")]


def _with_ends(stages: list[int], model: Model) -> list[int]:
    """Return the layers of stages of so many blocks: embeddings are the first stage's, final norm and head the last's.

    The loss is not counted.
    """
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    return [stages[0] + blocks[0], *stages[1:-1], stages[-1] + len(layers) - 2 - blocks[-1]]


def _named_stages(named: Value, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    """Return the entry of stages whose modules a file names in the order of the model, as torchtitan has them."""
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    sizes = {"tok_embeddings": blocks[0], "norm": len(layers) - 3 - blocks[-1], "output": 1}
    names = [str(name) for part in named.value for name in part]
    order = ["tok_embeddings", *(f"layers.{number}" for number in range(len(blocks))), "norm", "output"]
    if names != order or len(named.value) % ranks or not all(named.value):
        what = f"must be the {len(blocks)} blocks of '{model.name}' in their order, in as many stages for each rank"
        keys.refuse_value(named, what, "plan.stages")
        return []
    stages = [sum(sizes.get(str(name), 1) for name in part) for part in named.value]
    return [Entry.of("plan.stages", Value(stages, named.origin))]


def _weighted_stages(training: Training, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    """Return the entry of torchtitan's stages: embedding and head count as blocks, and what is left over goes to the
    first stages.

    Source: torchtitan 0.2, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part.
    """
    assert training.ends_in_blocks is not None
    assert training.pp is not None
    first, last = training.ends_in_blocks
    most, schedule = training.most_blocks_per_stage, training.schedule
    weighted = sum(instance.layer.block for instance in unrolled(model)) + first.value + last.value
    count = ranks * (2 if schedule is not None and schedule.value in INTERLEAVED else 1)
    origin = training.pp.origin
    if most is not None:
        count, origin = math.ceil(weighted / most.value), most.origin
    each, more = divmod(weighted, count)
    stages = [each + (number < more) for number in range(count)]
    stages[0] -= first.value
    stages[-1] -= last.value
    interleaves = schedule is not None and schedule.value in INTERLEAVED
    if min(stages) < 1 or count % ranks or (count > ranks) != interleaves:
        what = f"{count} stages of the blocks of '{model.name}' on {ranks} ranks cannot be made"
        keys.refuse_value(most or training.pp, what, "plan.stages")
        return []
    comment = f"{origin}; embedding and head count as {first.value} and {last.value} blocks"
    return [Entry("plan.stages", _with_ends(stages, model), comment)]
