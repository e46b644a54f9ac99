"""The stages of a pipeline that a file describes: equal ones, by names of modules, or with weighted ends."""

import math

from gssim.interop.reading import Keys, Value
from gssim.interop.training import Entry, Training
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.workload import Model, unrolled


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
