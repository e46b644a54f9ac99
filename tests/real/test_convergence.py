"""Studies of thresholds: paired intervals, findings (also: no gain), refused input, reused trainings."""

import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'gssim[analysis]'")

from analysis import charts
from analysis.cli import main
from analysis.study import study as study_module
from analysis.study.findings import findings_of, study_cells
from analysis.study.rows import (
    paired_difference,
    paired_ratio,
    rows_of,
    sent_bytes,
    spread,
    total_sent_bytes,
    write_csv,
)
from analysis.study.study import HERE, Elsewhere, Study, Trained, key_of, load_study, on_network, trainings_in
from gssim.errors import UserError
from gssim.result import Collective, Density, Evaluation, RankClass, Result
from gssim.scenario import load_scenario
from gssim.scenario.overrides import as_overrides
from gssim.simulation import simulate
from gssim.units import validated

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SEEDS = 5
SLOW = "a slow link"
VARIANTS = {
    "dense": {},
    "low": {"plan": {"push": {"threshold": 1e-4}}},
    "high": {"plan": {"push": {"threshold": 1e-2}}},
    "inf": {"plan": {"push": {"threshold": math.inf}}},
}


def make_study(**changes):
    variants = [{"name": name, "set": each, "control": name in ("dense", "inf")} for name, each in VARIANTS.items()]
    data = {"scenario": "s.toml", "seeds": list(range(SEEDS)), "dense": "dense", "silent": "inf", "variants": variants}
    return validated(Study, data | changes, file="made")


def make_result(
    *, loss, step_time_s, threshold=None, density=None, accuracy=None, sent=1e6, batch=16, source="measured"
):
    push = {"threshold": "inf" if threshold == math.inf else threshold, "kind": "absolute"}
    steps = () if density is None else tuple(density * factor for factor in (4.0, 1.0, 0.5))
    rank = RankClass(
        ranks=(0, 1), count=2, device="cpu", peak_allocated_bytes=1.0, peak_by_category_bytes={}, phases_s={},
        batch_share=0.5, shard_share=0.5,
    )  # fmt: skip
    scenario = {
        "name": "made",
        "plan": {"method": "gs", "push": push},
        "run": {"steps": 3, "warmup_steps": 0},
        "workload": {"global_batch_size": batch},
    }
    return Result(
        source=source,
        scenario_id="a" * 16,
        calibration_id="c" * 16,
        scenario=scenario,
        step_time_s=step_time_s,
        step_time_p10_s=step_time_s,
        phases_s={},
        fits=True,
        throughput_samples_per_s=1.0,
        density=Density(push=density, push_by_step=steps),
        collectives=(Collective(kind="all-to-all-v", group=(0, 1), bytes=int(2 * sent), count=1),),
        ranks=(rank,),
        loss=(3.0, 2.5, 2.2),
        evaluation=(
            Evaluation(step=1, loss=loss + 1, accuracy_ratio=accuracy),
            Evaluation(step=3, loss=loss, accuracy_ratio=accuracy),
        ),
    )


def make_rows(changes, speeds, *, study=None, slow=None, sd=0.01, accuracy=False):
    """Return rows of a study whose variants differ from dense by `changes` in loss and are `speeds` times as fast."""
    study = study or make_study()
    random = np.random.default_rng(0)
    of_seed = random.normal(2.0, 0.1, SEEDS)
    trained = []
    densities = {"low": 0.2, "high": 0.003, "inf": 0.0}
    for variant in study.variants:
        name, threshold = variant.name, variant.set.get("plan", {}).get("push", {}).get("threshold")
        noise = random.normal(0, sd, SEEDS)
        settings = {
            "threshold": threshold,
            "density": densities.get(name),
            "sent": 1e6 * (0.5 + densities.get(name, 1)),
        }
        results = [
            make_result(
                loss=of_seed[seed] + changes.get(name, 0.0) + noise[seed],
                step_time_s=0.1 * (1 + 0.01 * noise[seed] / sd) / speeds.get(name, 1.0),
                accuracy=0.9 - changes.get(name, 0.0) / 10 + noise[seed] / 10 if accuracy else None,
                **settings,
            )
            for seed in range(SEEDS)
        ]
        predicted = {HERE: speeds.get(name, 1.0), SLOW: (slow or {}).get(name, 1.0)}
        predictions = {n: make_result(loss=0.0, step_time_s=0.1 / speed) for n, speed in predicted.items()}
        trained.append(Trained(variant, tuple(results), predictions))
    return rows_of(study, trained)


# Pairs ---------------------------------------------------------------------------------------------------------------

FIGURES = st.lists(st.tuples(st.floats(0.5, 5), st.floats(0.5, 5)), min_size=2, max_size=8)


@given(FIGURES, st.floats(-3, 3))
def test_what_moves_both_of_every_pair_changes_no_effect(pairs, shift):
    values, reference = zip(*pairs, strict=True)
    effect = paired_difference(values, reference)
    moved = paired_difference([v + shift for v in values], [r + shift for r in reference])
    assert (moved.mean, moved.low, moved.high) == pytest.approx((effect.mean, effect.low, effect.high), abs=1e-9)
    assert effect.low <= effect.mean <= effect.high


@given(FIGURES)
def test_swapping_the_pairs_turns_an_effect_round(pairs):
    values, reference = zip(*pairs, strict=True)
    there, back = paired_difference(values, reference), paired_difference(reference, values)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low), abs=1e-12)
    faster, slower = paired_ratio(values, reference), paired_ratio(reference, values)
    assert (faster.mean, faster.low) == pytest.approx((1 / slower.mean, 1 / slower.high))


def test_an_interval_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(1)
    draws = random.normal(0.3, 1.0, (2000, 5))
    intervals = [paired_difference(draw.tolist(), [0.0] * 5) for draw in draws]
    held = [each.low <= 0.3 <= each.high for each in intervals]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)  # three standard errors


def test_the_interval_is_that_of_scipys_paired_test():
    from scipy.stats import ttest_rel

    values, reference = [2.1, 2.3, 2.2, 2.6, 2.4], [2.0, 2.25, 2.3, 2.4, 2.35]
    effect, theirs = paired_difference(values, reference), ttest_rel(values, reference).confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx((theirs.low, theirs.high))


def test_pairing_by_seed_shows_what_seeds_would_hide():
    seeds = [2.0, 2.4, 1.7, 2.9, 2.2]
    worse = [loss + 0.05 + 0.01 * (-1) ** i for i, loss in enumerate(seeds)]
    assert paired_difference(worse, seeds).low > 0
    assert spread(worse).mean - spread(seeds).mean < spread(seeds).sd


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_stand_beside_both_controls():
    rows = {row.name: row for row in make_rows({"low": 0.0, "high": 0.3, "inf": 0.3}, {"low": 1.0, "high": 1.5})}
    assert rows["dense"].loss_change is None
    assert rows["inf"].loss_over_silent is None
    assert rows["high"].loss_change.mean == pytest.approx(0.3, abs=0.02)
    assert rows["low"].loss_over_silent.mean == pytest.approx(-0.3, abs=0.02)
    assert rows["high"].speed_up.mean == pytest.approx(1.5, rel=0.02)
    assert rows["inf"].threshold == math.inf
    assert rows["dense"].density is None
    assert rows["low"].densities == pytest.approx((0.8, 0.2, 0.1))
    assert rows["low"].curve[-1][0] == 3
    assert [name for name, _ in rows["low"].predicted_s.items()] == [HERE, SLOW]


def test_the_loss_is_that_on_held_out_data_after_the_last_step():
    (row,) = [row for row in make_rows({}, {}, sd=1e-9) if row.name == "dense"]
    assert row.loss.mean == pytest.approx(row.curve[-1][1])
    assert row.curve[0][1] == pytest.approx(row.loss.mean + 1)


@pytest.mark.parametrize(
    ("kind", "copies"),
    [("all-reduce", 6), ("all-gather-v", 3), ("reduce-scatter", 3), ("all-to-all-v", 1), ("send", 1)],
)
def test_bytes_sent_are_those_of_the_exchange(kind, copies):
    entry = Collective(kind=kind, group=(0, 1, 2, 3), bytes=100, count=2)
    assert total_sent_bytes(entry) == 200 * copies


def test_data_dependent_messages_count_as_they_were_sent():
    result = make_result(loss=1.0, step_time_s=1.0)
    push = Collective(kind="all-to-all-v", group=(0, 1), bytes=1000, count=1, payload_bytes=120.0)
    assert sent_bytes(replace(result, collectives=(push,))) == 60.0  # of each of two ranks


def test_the_csv_has_every_speed_up_beside_density_loss_and_the_control():
    lines = write_csv(make_rows({"high": 0.3, "inf": 0.3}, {"high": 1.5})).splitlines()
    assert len(lines) == 1 + len(VARIANTS)
    header = lines[0].split(",")
    assert {"speed_up", "push_density", "loss_change", "loss_over_silent", f"speed_up_predicted ({SLOW})"} <= set(
        header
    )
    assert any(line.startswith("inf,True,inf") for line in lines)


# What is found -------------------------------------------------------------------------------------------------------


def found(*args, **kwargs):
    return findings_of(make_study(), make_rows(*args, **kwargs))


def test_a_gain_is_faster_loses_nothing_and_beats_pushing_nothing():
    says = found({"high": 0.3, "inf": 0.4}, {"low": 1.4, "high": 1.6, "inf": 1.7})
    assert says.time.startswith(
        "Significantly faster than dense, without a significant loss, and better than pushing nothing: 'low'"
    )
    assert "'high'" not in says.time
    assert "density 20 %" in says.time


def test_no_gain_where_no_step_is_shorter():
    says = found({"high": 0.3, "inf": 0.4}, {"low": 0.95, "high": 0.98, "inf": 0.99})
    assert says.time == "No gain: no variant is significantly faster than dense"
    said = "Measured: none is significantly faster than dense: at most 'high'"
    assert any(each.startswith(said) for each in says.all)


def test_no_gain_where_what_is_faster_is_no_better_than_pushing_nothing():
    says = found({"low": 0.45, "high": 0.45, "inf": 0.4}, {"low": 1.4, "high": 1.6, "inf": 1.7})
    assert says.time.startswith(
        "No gain: variants faster than dense lose by it, or are not significantly better than pushing nothing: 'low'"
    )
    assert any(each.startswith("Not significantly better than pushing nothing: 'low' (") for each in says.all)


def test_where_pushing_nothing_loses_nothing_no_push_is_shown_to_be_of_use():
    says = found({"low": 0.04, "high": 0.04}, {"low": 1.4, "high": 1.6, "inf": 1.7}, sd=0.05)
    assert any("this study shows no benefit of pushing" in each for each in says.all)
    assert says.time.startswith("No gain: variants faster than dense lose by it, or are not significantly better")


def test_losses_are_sorted_into_those_that_show_and_those_that_do_not():
    says = found({"high": 0.3, "inf": 0.4}, {})
    assert says.quality.startswith("The loss is significantly higher (5 seeds) with 'high' (+0.298")
    assert "; not with 'low' (" in says.quality
    assert found({"low": 0.2, "high": 0.3, "inf": 0.4}, {}).quality.startswith("Every variant raises the loss: 'low'")
    assert found({"inf": 0.4}, {}).quality.startswith("No variant has a significantly higher loss (5 seeds): 'low'")


def test_every_sentence_with_a_speed_has_density_loss_and_the_control():
    says = found({"high": 0.3, "inf": 0.4}, {"low": 1.4, "inf": 1.7}, slow={"high": 3.0, "inf": 3.5})
    speeds = [each for each in says.all if "times dense's speed" in each]
    assert len(speeds) == 3  # the verdict, what was measured, what is predicted elsewhere
    assert all("density" in each and "loss" in each for each in speeds)
    assert all("pushing nothing" in each for each in speeds)
    assert any(each.startswith(f"Predicted for {SLOW}: at most 3.00 times dense's speed, 'high'") for each in speeds)


def test_density_that_moves_is_said():
    assert found({}, {}).density.startswith("Density moves by a factor of up to 8 within a run ('")


# Charts --------------------------------------------------------------------------------------------------------------

CHARTS = ("against_threshold", "against_bytes", "against_time", "by_step")


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [
        pytest.param(name, accuracy, marks=[] if accuracy == (place % 2 == 0) else pytest.mark.slow)
        for place, name in enumerate(CHARTS)
        for accuracy in (False, True)
    ],
)
def test_a_chart_asks_says_what_was_found_and_names_every_variant(name, accuracy):
    rows = make_rows({"high": 0.3, "inf": 0.4}, {"low": 1.2}, accuracy=accuracy)
    says = findings_of(make_study(), rows)
    figure = getattr(charts.convergence, name)(make_study(), rows, says)
    titles = {"against_threshold": says.quality, "against_bytes": says.bytes, "against_time": says.time}
    text = " ".join(each.get_text() for each in figure.texts)
    assert titles.get(name, says.density) in text
    assert figure.texts[0].get_text().endswith("?")
    (legend,) = figure.legends
    names = [label.get_text().partition(":")[0] for label in legend.get_texts()][2:]  # after the lines of controls
    assert [name.removesuffix(" (control)") for name in names] == list(VARIANTS)
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert len(charts.png(figure)) > 10_000


def test_what_another_beats_on_both_axes_is_grey():
    rows = make_rows({"low": 0.1, "high": 0.3, "inf": 0.2}, {"low": 2.0, "high": 1.5, "inf": 3.0}, sd=1e-6)
    places = {row.name: row.step_time_s.mean for row in rows}
    assert charts.convergence.dominated(rows, places, charts.convergence.LOSS, make_study()) == {"high"}


def test_a_training_on_fewer_samples_beats_nobody():
    rows = make_rows({"low": -0.5, "high": 0.1, "inf": 0.2}, {"low": 2.0}, sd=1e-6)
    rows = [replace(row, samples=row.samples // 2) if row.name == "low" else row for row in rows]
    places = {row.name: row.step_time_s.mean for row in rows}
    assert "dense" not in charts.convergence.dominated(rows, places, charts.convergence.LOSS, make_study())


def test_the_table_says_speed_beside_density_and_loss():
    rows = {row.name: row for row in make_rows({"high": 0.3, "inf": 0.4}, {"high": 1.5}, accuracy=True)}
    cells = study_cells(rows["high"])
    assert cells[0] == "high"
    assert cells[1] == "0.3 %"
    assert cells[4].startswith("+0.")
    assert cells[5].startswith("1.5")
    assert study_cells(rows["dense"])[:2] == ("dense (control)", "all")


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0]}, r"made: seeds = \[0\]: .*at least 2"),
        ({"seeds": [0, 0]}, r"made: .*seeds = \[0, 0\]: each may be given once"),
        ({"dense": "thick"}, r"dense = 'thick': no variant has this name; there are dense, low, high, inf"),
        ({"silent": "mute"}, r"silent = 'mute': no variant has this name"),
        ({"varaints": []}, r"made: varaints: unknown key; did you mean variants\?"),
        ({"variants": [{"name": "a"}, {"name": "A"}]}, r"two are named 'a'"),
        (
            {"variants": [{"name": "dense", "control": True}, {"name": "inf", "control": True}]},
            "variants: all are controls; one is needed that is not",
        ),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_study(**changes)


def test_density_is_taken_of_a_variant_before():
    variants = [{"name": "dense"}, {"name": "inf"}, {"name": "target", "density_of": "later"}, {"name": "later"}]
    with pytest.raises(UserError, match=r"density_of = 'later': no variant before 'target' is so named"):
        make_study(variants=variants)


STUDY = """
scenario = "{scenario}"
seeds = [0, 1]
dense = "dense"
silent = "inf"

[set]
run.steps = 6
run.warmup_steps = 0
{evaluate}
workload.sequence_length = 16
workload.global_batch_size = 4

[[variants]]
name = "dense"
control = true
set = {{ {dense} }}

[[variants]]
name = "inf"
set = {{ plan.push.threshold = {silent} }}
"""


ELSEWHERE = """
[[elsewhere]]
name = "far"
bandwidth_bytes_per_s = "1 GB"
latency_s = "1 ms"
"""


def write_study(folder, *, scenario=SCENARIOS / "demo.toml", evaluate=3, dense="", silent="inf", more=""):
    every = f"run.evaluate_every_steps = {evaluate}" if evaluate else ""
    file = folder / "study.toml"
    file.write_text(STUDY.format(scenario=scenario, evaluate=every, dense=dense, silent=silent) + more)
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": "none.toml"}, "scenario = 'none.toml': no such file beside it"),
        ({"evaluate": None}, "variants[0] 'dense': run.evaluate_every_steps: missing"),
        ({"dense": "plan.push.threshold = 0.1"}, "the variant 'dense' names must have none"),
        ({"silent": "1.0"}, "plan.push.threshold = 1.0: must be inf: 'silent' names this variant"),
        ({"dense": "plan.mehtod = 'gs'"}, "variants[0] 'dense': "),
        ({"dense": "workload.global_batch_size = 5"}, "cannot be divided evenly among 2 ranks"),
        ({"more": ELSEWHERE}, "elsewhere[0].bandwidth_bytes_per_s = '1 GB': is in bytes, but bytes/s is needed"),
    ],
)
def test_a_study_is_refused_in_one_line_before_anything_runs(changes, message, tmp_path, monkeypatch, capsys):
    file = write_study(tmp_path, **changes)
    monkeypatch.setattr("sys.argv", ["analysis", "convergence", str(file), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"analysis: {file}: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seeds", [1, 3])
def test_seeds_that_a_study_has_not_are_refused(seeds, tmp_path):
    with pytest.raises(UserError, match=rf"--seeds {seeds}: must be from 2 to 2"):
        load_study(write_study(tmp_path), seeds=seeds)


def test_overrides_of_the_command_line_come_after_those_of_the_file(tmp_path):
    loaded = load_study(write_study(tmp_path), ("run.steps=9",))
    scenario = loaded.load(loaded.study.variants[1], seed=7).scenario
    assert (scenario.run.steps, scenario.run.seed, scenario.plan.push.threshold) == (9, 7, math.inf)


def test_elsewhere_the_link_is_what_takes_the_time():
    """On a slow link, the bytes that a device sends take as long as its bandwidth says, and no less."""
    here = load_scenario(SCENARIOS / "demo.toml")
    slow = Elsewhere(name="slow", bandwidth_bytes_per_s=1e6, latency_s=0.0)
    result = simulate(on_network(here, slow)).result
    for rank in result.ranks:
        assert rank.phases_s["exposed_communication"] == pytest.approx(rank.bytes_sent / 1e6, rel=0.05)
    assert max(link.utilisation_ratio for link in result.links) <= 1.0


@pytest.mark.parametrize("file", sorted((SCENARIOS / "studies").glob("*.toml")), ids=lambda file: file.stem)
def test_studies_that_ship_have_the_controls_and_five_seeds(file):
    study = load_study(file).study
    assert len(study.seeds) >= 5
    changes = [override for variant in study.variants for override in as_overrides(variant.set)]
    if study.together:
        methods = [change.split('"')[1] for change in changes if change.startswith("plan.method=")]
        assert {"ddp", "half", "powersgd", "topk", "local_sgd", "diloco", "streaming_diloco", "sparse_loco"} <= set(
            methods
        )
        assert any(change.startswith("plan.publish.threshold=") for change in changes)
        assert len(study.elsewhere) >= 3
        return
    for control in ("plan.push.error_feedback=true", "plan.push.aggregate=", "workload.global_batch_size="):
        assert any(change.startswith(control) for change in changes)
    assert any(variant.density_of for variant in study.variants)


# What is kept --------------------------------------------------------------------------------------------------------


def test_a_kept_result_stands_for_the_same_training_alone(tmp_path):
    changes = ["plan.push.threshold=inf", "run.evaluate_every_steps=5"]

    def ask(*others):
        return load_scenario(SCENARIOS / "demo.toml", [*changes, *others], gradients_needed=False)

    asked = ask()
    kept = replace(
        make_result(loss=1.0, step_time_s=1.0),
        scenario_id=asked.scenario.scenario_id,
        scenario=json.loads(json.dumps(asked.scenario.resolved())),
    )

    def stands_for(asked):
        store = trainings_in(tmp_path)
        store.keep("kept.json", kept)
        return store.kept("kept.json", key_of(asked.scenario.scenario_id, asked.scenario.resolved())) == kept

    assert stands_for(asked)
    assert stands_for(ask("name=other"))
    retraced = kept.scenario["workload"]["model"]["layers"][0] | {"forward_streamed_bytes": "7"}  # said by newer code
    kept.scenario["workload"]["model"]["layers"][0] = retraced
    assert stands_for(asked)
    for other in ("run.evaluate_every_steps=6", "run.seed=1", "workload.learning_rate=1.0"):
        assert not stands_for(ask(other))


def test_an_interrupted_study_goes_on_where_it_was(tmp_path, monkeypatch):
    """A command that is broken off loses itself alone; a finished study runs nothing again."""
    loaded = load_study(write_study(tmp_path))
    ran = []

    def command(arguments):
        if len(ran) == 2 and "broken" not in ran:
            ran.append("broken")
            raise KeyboardInterrupt
        ran.append(arguments[0])
        out = Path(arguments[arguments.index("--out") + 1])
        changes = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
        scenario = load_scenario(Path(arguments[1]), changes, gradients_needed=False).scenario
        made = make_result(loss=1.0 + scenario.run.seed, step_time_s=0.1, threshold=scenario.plan.push.threshold)
        made = replace(made, scenario_id=scenario.scenario_id, scenario=scenario.resolved())
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{scenario.name}.{scenario.scenario_id}.measured.json").write_text(made.to_json())

    monkeypatch.setattr(study_module, "_gsreal", command)
    monkeypatch.setattr(
        study_module, "statistics_of", lambda loaded, dense, inputs, out: SCENARIOS / "gradients" / "gpt-byte-1m.json"
    )
    monkeypatch.setattr(study_module, "_predictions", lambda *_: {HERE: make_result(loss=0.0, step_time_s=0.1)})
    with pytest.raises(KeyboardInterrupt):
        study_module.train(loaded, tmp_path / "out")
    assert ran == ["run", "run", "broken"]
    trained = study_module.train(loaded, tmp_path / "out")
    assert ran == ["run", "run", "broken", "run", "run"]
    assert [each.variant.name for each in trained] == ["dense", "inf"]
    assert [result.evaluation[-1].loss for result in trained[0].results] == [1.0, 2.0]
    study_module.train(loaded, tmp_path / "out")
    assert len(ran) == 5


# For real ------------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
def test_a_study_trains_compares_and_draws_for_real_and_a_second_time_only_reads(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    file = write_study(tmp_path)
    out = tmp_path / "out"
    arguments = ["analysis", "convergence", str(file), "--out", str(out), "--set", "run.steps=2"]
    monkeypatch.setenv("PYTHONPATH", str(SCENARIOS.parent))
    monkeypatch.setattr("sys.argv", [*arguments, "--set", "run.evaluate_every_steps=1"])
    for again in (False, True):
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        printed = capsys.readouterr()
        assert ("training 4 of 4: inf, seed 1" in printed.err) is not again
        assert "gsreal gradients" not in printed.err or not again
    pictures = {f"loss_{each}.{suffix}" for each in CHARTS for suffix in ("png", "svg")}
    names = {"convergence.csv", "findings.txt", *pictures}
    assert names <= {path.name for path in out.iterdir()}
    found = [json.loads(path.read_text()) for path in sorted(out.glob("results/*.measured.json"))]
    dense, silent = ([each for each in found if each["scenario"]["name"] == name] for name in ("dense", "inf"))
    assert [each["density"]["push"] for each in silent] == [0.0, 0.0]
    for one in dense:
        (other,) = [each for each in silent if each["scenario"]["run"]["seed"] == one["scenario"]["run"]["seed"]]
        assert other["loss"][0] == pytest.approx(one["loss"][0], rel=1e-6)  # same parameters, same batch
        assert other["evaluation"][-1]["loss"] != one["evaluation"][-1]["loss"]
        assert other["scenario"]["plan"]["push"]["threshold"] == "inf"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_training_ends_with_a_study_that_is_killed(tmp_path):
    """It went on, beside the trainings and the calibration of the next call."""
    started = tmp_path / "started"
    study = os.fork()
    if not study:
        study_module._run(["sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 60"], "sleep")
        os._exit(1)
    until_s = time.monotonic() + 20
    while not started.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    os.kill(study, signal.SIGKILL)
    os.waitpid(study, 0)
    training = Path(f"/proc/{started.read_text().strip()}/cmdline")
    while training.exists() and b"sleep" in training.read_bytes() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not (training.exists() and b"sleep" in training.read_bytes())
