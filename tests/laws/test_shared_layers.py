"""Layers that several pipeline stages have: copies of tied parameters, whose gradients are all-reduced, and layers that
each stage runs itself. All shipped models run in stages.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import loaded_of, scenario_of, star

from gssim.program import lower
from gssim.result import Result
from gssim.scenario import Scenario, check, load_model, tied_parameters
from gssim.simulation import simulate
from gssim.units import validated
from gssim.workload import Model, unrolled

MODELS = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "models").glob("*.toml"))
ELEMENTS = 50_000
"""Elements of the parameter that the first and the last layer share."""


def tied_chain(*, tied: bool) -> Model:
    """Return an embedding, two blocks and a head that uses the embedding's weight, or one of its own of that size."""
    nothing = {
        key: 0
        for key in ("forward_flop", "backward_flop", "forward_bytes", "backward_bytes", "saved_bytes", "output_bytes")
    } | {"forward_operations": 0, "backward_operations": 0}
    size = 4 * ELEMENTS
    passed = ["f1 b1@+1 activations 16*b*s"]
    first = {
        "name": "tokens",
        "modules": ["tokens"],
        "parameters": [f"{{}}.weight {ELEMENTS} {'b2 b3' if tied else 'b1 b3'}"],
        "buffers": [*passed, *([f"b1 b2 temporaries {size}"] if tied else [])],
        "backward_bytes": 4 * size if tied else size,
    }
    block = {
        "name": "h",
        "modules": ["h.0", "h.1"],
        "block": True,
        "forward_flop": "1000000*b*s",
        "backward_flop": "2000000*b*s",
        "buffers": [*passed, "b0 b1@-1 temporaries 16*b*s"],
    }
    head = {
        "name": "head",
        "modules": ["head"],
        "parameters": [] if tied else [f"{{}}.weight {ELEMENTS} b1 b3"],
        "buffers": [
            *([f"b1 b2@-3 temporaries {size}"] if tied else []),
            "f1 b0@+1 activations 8*b*s",
            "b0 b1@-1 temporaries 16*b*s",
        ],
        "backward_bytes": size,
    }
    data = {
        "name": "tied" if tied else "untied",
        "source": "made by hand for the tests",
        "traced_batch_sizes": [1],
        "module": {"factory": "nowhere.tied"},
        "input": {"kind": "tokens", "vocabulary": 16, "maximum_sequence_length": 4},
        "layers": [nothing | each for each in (first, block, head, {"name": "loss", "modules": []})],
    }
    return validated(Model, data, file="tied")


def pipeline(model: Model, ranks: int = 2, *, replicas: int = 1, bandwidth: float = 1e6, **plan) -> Scenario:
    method = {"method": "ddp", "pp": ranks, "dp_replicate": replicas} if replicas > 1 else {"method": "pipeline"}
    made = scenario_of(
        star(ranks * replicas, bandwidth=bandwidth),
        {"micro_batches": 4} | method | plan,
        model=model,
        global_batch_size=4 * replicas,
        sequence_length=4 if model.input.kind == "tokens" else None,
        optimizer="sgd",
    )
    check(made, file="made")
    return made


def predicted(scenario: Scenario) -> Result:
    return simulate(loaded_of(scenario)).result


def test_the_gradients_of_tied_copies_are_all_reduced_over_the_first_and_the_last_stage_after_the_schedule():
    """An all-reduce of S bytes over n ranks at B bytes/s takes 2 (n - 1)/n S/B, of which nothing is hidden.

    Both copies are held, updated and reduced as if they were parameters of their own.
    """
    tied, untied = (predicted(pipeline(tied_chain(tied=each))) for each in (True, False))
    sums = [entry for entry in tied.collectives if entry.kind == "all-reduce"]
    assert [(entry.group, entry.bytes, entry.count) for entry in sums] == [((0, 1), 4 * ELEMENTS, 1)]
    assert not [entry for entry in untied.collectives if entry.kind == "all-reduce"]
    assert tied.step_time_s - untied.step_time_s == pytest.approx(4 * ELEMENTS / 1e6, rel=1e-9)
    assert [rank.peak_allocated_bytes for rank in tied.ranks] == [rank.peak_allocated_bytes for rank in untied.ranks]


def test_replicas_sum_their_own_copies_first():
    tied = predicted(pipeline(tied_chain(tied=True), 2, replicas=2))
    of_copies = {entry.group: entry for entry in tied.collectives if entry.kind == "all-reduce" and entry.count == 1}
    assert {(0, 2), (1, 3)} <= set(of_copies)  # pp is the outer axis: stage 0 is on ranks 0 and 1
    tasks = lower(pipeline(tied_chain(tied=True), 2, replicas=2)).tasks[0]
    labels = [task.label for task in tasks]
    assert labels.index("wait for all-reduce micro-batch 3") < labels.index("all-reduce tokens.weight")
    assert labels.index("all-reduce tokens.weight") < labels.index("optimizer")


def test_one_stage_with_all_uses_has_one_copy():
    model = tied_chain(tied=True)
    layers = unrolled(model)
    assert tied_parameters(layers, [range(5)]) == ()
    (tied,) = tied_parameters(layers, [range(1), range(1, 3), range(3, 5)])
    assert (tied.name, tied.stages, tied.elements) == ("tokens.weight", (0, 2), ELEMENTS)


RECOMPUTED = ("gpt3-1.3b", "gpt2-124m", "bert-base", "llama2-7b", "resnet-50")
QUICK = (
    *("bert-byte-1m", "deepseek-moe-byte-240k", "gpt-byte-150k", "llama3-8b-compiled", "mixture-byte-1m"),
    "resnet-digits",
)
"""Models that are not slow: every family once; those that are run again are others."""


@pytest.mark.parametrize(
    ("file", "recompute"),
    [pytest.param(file, "none", marks=[] if file.stem in QUICK else pytest.mark.slow) for file in MODELS]
    + [
        pytest.param(file, "full", marks=[] if file.stem in ("gpt2-124m", "resnet-50") else pytest.mark.slow)
        for file in MODELS
        if file.stem in RECOMPUTED
    ],
    ids=lambda each: each if isinstance(each, str) else each.stem,
)
def test_every_shipped_model_runs_in_stages(file, recompute):
    """Stages hold all parameters and module buffers, tied ones twice, and free in a step all that they allocate."""
    model = load_model(file)
    scenario = pipeline(model, 3, bandwidth=1e12, recompute=recompute)
    layers = unrolled(model)
    copies = sum(tied.elements for tied in tied_parameters(layers, scenario.stage_ranges))
    held = [instance for stage in scenario.stages for instance in stage]
    assert sum(instance.layer.elements for instance in held) == model.elements + copies
    shared = len(held) - len(layers)
    has_angles = any(family in model.name for family in ("llama", "mixtral", "qwen3"))
    assert shared == (2 if has_angles else 0)  # rotary angles, in all stages but the first
    program = lower(scenario)
    assert sum(each["parameters"] for each in program.persistent) == 4 * (model.elements + copies)
    buffers = sum(each.get("buffers", 0) for each in program.persistent)
    repeated = sum(each.layer.module_buffer_bytes for each in held) - sum(model.buffer_bytes)
    assert buffers == sum(model.buffer_bytes) + repeated
    for tasks in program.tasks:
        left: dict[str, float] = defaultdict(float)
        for task in tasks:
            for category, size in task.need.kept:
                left[category] += size
        assert {category: size for category, size in left.items() if abs(size) > 1e-6} == {}
    assert predicted(scenario).step_time_s > 0


def test_layers_whose_gradients_arise_in_the_next_are_not_separated():
    """In GPT-2's trace the embeddings' gradients are allocated in the backward of the dropout behind them."""
    model = load_model(next(file for file in MODELS if file.stem == "gpt2-124m"))
    assert all(numbers.stop != 1 for numbers in pipeline(model, 12).stage_ranges)
    with pytest.raises(Exception, match="both must be in one stage"):
        pipeline(model, 2, stages=[1, 15])


def test_a_model_file_that_does_not_list_the_holders_of_buffers_is_refused():
    model = replace(tied_chain(tied=True), buffer_bytes=(64,))
    with pytest.raises(Exception, match=r"the model file does not list which layers hold the module buffers of 64 "):
        pipeline(model)
