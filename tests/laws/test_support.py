"""`gssim support`: the methods, and what each combines with; as trying shows."""

import json
from pathlib import Path

import pytest

from gssim.cli.reports import print_support
from gssim.errors import UserError
from gssim.plan import METHODS
from gssim.scenario import load_scenario, support
from gssim.scenario.overrides import overrides_of
from gssim.scenario.support import FEATURES, supported
from gssim.simulation import simulate

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "lab-2-hosts.toml"
SHORT = ("run.steps=2", "run.warmup_steps=1")
RATES = (*SHORT, f"cluster={SCENARIO.parent / 'clusters/four-unequal-gpus.toml'}")
"""On devices whose rates in 16 bits are stated."""


def test_methods_are_listed_with_what_runs_them(gssim):
    code, out, _ = gssim("support", "--json")
    assert code == 0
    assert [entry["name"] for entry in json.loads(out)] == list(METHODS)
    assert all(entry["description"] and entry["real"] for entry in json.loads(out))
    code, out, _ = gssim("support")
    assert code == 0
    assert all(f" {name} " in out for name in METHODS)


def test_a_scenario_shows_what_combines(gssim):
    rates = [word for override in RATES for word in ("--set", override)]
    code, out, _ = gssim("support", SCENARIO, "--json", *rates)
    assert code == 0
    cells = {(entry["method"], entry["feature"]): entry for entry in json.loads(out)}
    assert len(cells) == len(METHODS) * len(FEATURES)
    assert cells["ddp", "tp 2"]["real"] is None
    assert "pushes no gradients" in cells["ddp", "push threshold"]["simulated"]
    assert cells["ddp", "fp16"]["simulated"] is None
    assert "loss scaling" in cells["ddp", "fp16"]["real"]
    code, out, _ = gssim("support", SCENARIO, *rates)
    assert code == 0
    assert all(line in out for line in ("push threshold", "yes", "sim"))
    assert gssim("support", SCENARIO, "--set", "plan.metod=ddp")[0] == 2


@pytest.fixture(scope="module")
def combinations():
    return list(supported(SCENARIO, RATES))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_supported_can_be_simulated_and_nothing_else(method, part, combinations):
    """Every eighth feature of a method: supported ones are simulated, others refused with the reported reason.

    Others of the next method, so that eight methods show all features.
    """
    first = (part + list(METHODS).index(method)) % 8
    for entry in [entry for entry in combinations if entry.method == method][first::8]:
        changes = overrides_of({"plan": {"method": method}} | dict(FEATURES[entry.feature]))
        if entry.simulated is None:
            needed = "threshold" in entry.feature
            gradients = ["workload.gradients=gradients/gpt-byte-1m.json"] if needed else []
            loaded = load_scenario(SCENARIO, [*RATES, *gradients, *changes])
            assert simulate(loaded).result.step_time_s > 0, entry
        else:
            with pytest.raises(UserError) as refused:
                simulate(load_scenario(SCENARIO, [*RATES, *changes]))
            assert entry.simulated in str(refused.value)


def test_pipelines_of_a_module_that_real_runs_cannot_cut_are_only_simulated(tmp_path):
    small = SCENARIO.parents[1] / "tests/helpers/models/of_tests/tiny-gpt.toml"
    reason = "Own cannot be cut into stages"
    model = tmp_path / "own.toml"
    model.write_text(f'unstaged_reason = "{reason}"\n{small.read_text()}')
    changes = (*RATES, f"workload.model={model}", "workload.sequence_length=24")
    cells = {(each.method, each.feature): each for each in supported(SCENARIO, changes)}
    staged = {place for place, each in cells.items() if each.simulated is None and reason in (each.real or "")}
    assert {("pipeline", "alone"), ("ddp", "pp 2"), ("zero1", "pp 2, interleaved")} <= staged
    assert all("pp 2" in feature or method == "pipeline" for method, feature in staged)
    assert cells["ddp", "2 micro-batches"].real is None


def test_what_the_file_sets_and_no_real_run_has_is_only_simulated():
    """A value of the workload or the run, which every cell keeps, and not only one of the feature itself."""
    cells = {(each.method, each.feature): each for each in supported(SCENARIO, ("run.extrapolate_micro_batches=true",))}
    assert cells["ddp", "alone"].simulated is None
    assert cells["ddp", "alone"].real == (
        "run.extrapolate_micro_batches = True: a real run has all micro-batches; allowed: false"
    )


@pytest.mark.parametrize(
    ("changes", "method", "real"),
    [
        (SHORT, "tensor", None),
        ((*RATES, "cluster.backend=nccl"), "ddp", "is run with cluster.backend = 'gloo' only"),
    ],
    ids=["gloo", "nccl"],
)
def test_exchanges_beside_products_are_real_on_gloo_alone(changes, method, real):
    cells = {(each.method, each.feature): each for each in supported(SCENARIO, changes)}
    for feature in ("tp 2, exchanges beside products", "tp 2, exchanges beside products, full recomputation"):
        cell = cells[method, feature]
        assert cell.simulated is None
        assert (cell.real is None) if real is None else (real in cell.real)


@pytest.mark.parametrize(
    ("changes", "simulated", "real"),
    [
        # rates that are not stated, by which stages are cut
        (["workload.precision=bf16"], {"zero2", "pipeline", "tensor"}, {"pipeline": "no peak_flop_per_s.bf16"}),
        (["run.evaluate_every_steps=1"], {}, {"pipeline": "no rank of a pipeline has the whole model"}),
        (
            ["workload.optimizer=sgd", "workload.optimizer_implementation=fused"],
            {},
            {"zero2": "torch has no fused SGD for FSDP2's shards"},
        ),
        (
            [RATES[-1], "cluster.backend=gloo"],
            {"tensor"},
            {"pipeline": "pipelines on GPUs can be predicted, but not run", "tensor": "makes 2 of the 4 devices"},
        ),
    ],
    ids=["no-rates", "evaluation", "fused-sgd", "gloo-on-gpus"],
)
def test_real_runs_are_said_to_run_and_refuse_what_they_do(changes, simulated, real, monkeypatch, capsys):
    """Also for what the file says: the column knew the features' own reasons alone, and missing rates as one."""
    features = {"zero2": "alone", "pipeline": "alone", "tensor": "sequence parallelism"}
    monkeypatch.setattr(support, "FEATURES", {name: FEATURES[name] for name in features.values()})
    monkeypatch.setattr(support, "METHODS", features)
    cells = [each for each in support.supported(SCENARIO, (*SHORT, *changes)) if features[each.method] == each.feature]
    assert {each.method for each in cells if each.simulated} == set(simulated)
    assert {each.method for each in cells if each.real} == set(real)
    assert all(real[each.method] in each.real for each in cells if each.real)
    print_support([each for each in cells if each.feature == "alone"])
    runs_only = [each for each in cells if each.feature == "alone" and each.simulated and not each.real]
    assert (" real " in capsys.readouterr().out.split("yes:")[0].replace("\n", " ")) == bool(runs_only)
