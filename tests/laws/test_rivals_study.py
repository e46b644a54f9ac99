"""Laws of studies that train all ranks in one process: losses at equal samples, bytes and time, time to equal loss."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from analysis import charts
from analysis.study import rivals
from analysis.study import study as study_module
from analysis.study.equal_loss import (
    MapPoint,
    carried_over,
    map_findings,
    map_points,
    pushed_variants,
    steps_to,
    steps_to_equal_loss,
    write_map,
)
from analysis.study.rivals import (
    Course,
    _partly_dense,
    findings,
    inputs_of,
    jobs_of,
    read_courses,
    readings_of,
    train_together,
    winners_table,
    write_table,
)
from analysis.study.study import FurtherModel, Map, Study, Variant, load_study
from gssim.errors import UserError
from gssim.units import validated

NETWORK = "a slow link"


def course(name, *, ends, step_bytes, step_time_s, density=None, control=False):
    """Return a course whose loss falls in a straight line from 5 to its end, seed by seed."""
    steps = (0, 50, 100)
    losses = tuple((5.0, (5.0 + end) / 2, end) for end in ends)
    variant = Variant(name=name, control=control)
    return Course(variant, steps, losses, (), density, step_bytes, {NETWORK: step_time_s}, density)


DENSE = course("dense", ends=(1.0, 1.1, 0.9), step_bytes=1000.0, step_time_s=1.0, control=True)
SMALL = course("small", ends=(2.0, 2.1, 1.9), step_bytes=10.0, step_time_s=0.1)
PUSHED = course("pushed", ends=(3.0, 3.1, 2.9), step_bytes=500.0, step_time_s=0.5, density=0.1)
SILENT = course("silent", ends=(4.0, 4.1, 3.9), step_bytes=400.0, step_time_s=0.4, density=0.0, control=True)
ALL = [DENSE, SMALL, PUSHED, SILENT]


def test_a_loss_is_read_where_the_budget_ends():
    samples, sizes, times = readings_of(ALL, "dense")
    assert samples.losses["dense"] == [1.0, 1.1, 0.9]
    # dense has sent a quarter of its own bytes after 25 steps, pushed after 50, small after its last
    assert sizes.losses["dense"][0] == pytest.approx(5.0 - 4.0 * 25 / 100)
    assert sizes.losses["pushed"][0] == pytest.approx(4.0)
    assert sizes.losses["small"] == [2.0, 2.1, 1.9]
    # the quickest takes 10 s: ten steps of dense
    assert times.losses["dense"][0] == pytest.approx(5.0 - 4.0 * 10 / 100)
    assert [each.best for each in (samples, sizes, times)] == ["dense", "small", "small"]


def test_what_the_seeds_do_not_tell_from_the_best_is_said():
    near = course("near", ends=(1.05, 1.0, 1.0), step_bytes=1000.0, step_time_s=1.0)
    assert readings_of([*ALL, near], "dense")[0].level == ("near",)
    assert "**1.000**" in winners_table([*ALL, near], "dense")
    assert "1.017 ≈" in winners_table([*ALL, near], "dense")


def test_findings_also_say_where_gradient_sharding_loses():
    said = findings(ALL, "dense", "silent")
    assert "significantly worse at equal samples, equal bytes, equal time, a slow link" in said[-1]
    assert any("pushing lowers the loss" in each for each in said)
    useless = course("pushed", ends=(4.0, 4.2, 3.8), step_bytes=500.0, step_time_s=0.5, density=0.1)
    said = findings([DENSE, SMALL, useless, SILENT], "dense", "silent")
    assert any("not significantly better than pushing nothing" in each for each in said)


def test_no_name_in_a_table_is_a_formula_to_a_spreadsheet():
    named = [replace(each, variant=replace(each.variant, name=f"={each.variant.name}")) for each in ALL]
    table = write_table(named, "=dense")
    assert [line.split(",")[0] for line in table.splitlines()[1:]] == ["'=dense", "'=small", "'=pushed", "'=silent"]
    times_s = {"=dense": (1.0, 1.1), "gs": (math.inf, math.inf)}
    point = MapPoint("=gpt", 1e9, 1e-5, 1.0, {"=dense": 1.0, "gs": 0.5}, times_s)
    lines = write_map([point]).splitlines()
    assert lines[1:] == [
        "'=gpt,1.0,1000000000.0,1e-05,'=dense,True,1.0,,,1.04881,1.0000,True,True",
        "'=gpt,1.0,1000000000.0,1e-05,gs,True,0.5,,,,,False,False",
    ]


def test_the_table_and_the_charts_have_every_variant():
    table = write_table(ALL, "dense")
    assert [line.split(",")[0] for line in table.splitlines()[1:]] == ["dense", "small", "pushed", "silent"]
    drawn = charts.rivals_charts(ALL, "dense", findings(ALL, "dense", "silent"))
    assert [len(each.figure.axes) for each in drawn] == [1, 1]
    labels = [text.get_text() for text in drawn[0].figure.legends[0].get_texts()]
    assert labels == ["dense (control)", "small", "pushed: 10 %", "silent (control): 0 %"]
    # a method that begins far above the others pressed them together
    losses = tuple((90.0, 90.0, *each[2:]) for each in SMALL.losses)
    far = replace(SMALL, variant=replace(SMALL.variant, name="far"), losses=losses)
    (axes,) = charts.rivals_charts([*ALL, far], "dense", ["said"])[0].figure.axes
    assert axes.get_ylim()[1] < 20
    said = " ".join(text.get_text() for text in axes.figure.texts)
    assert "first readings are not shown" in said


def test_steps_that_are_not_compressed_count_as_denses():
    mean = _partly_dense(0.1, SMALL, DENSE)
    assert mean.step_bytes == pytest.approx((90 * 10.0 + 10 * 1000.0) / 100)
    assert mean.step_time_s[NETWORK] == pytest.approx((90 * 0.1 + 10 * 1.0) / 100)
    assert mean.losses == SMALL.losses


ELSEWHERE = {"name": NETWORK, "bandwidth_bytes_per_s": 1e6, "latency_s": 0.0}
VARIANTS = ({"name": "dense", "control": True}, {"name": "other"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unequal_ratio": 0.5}, "needs together = true"),
        ({"map": Map(bandwidth_bytes_per_s=(1.0, 2.0), latency_s=(0.0,))}, "needs together = true"),
        ({"reuse": "folder"}, "needs together = true"),
        ({"together": True}, "list `elsewhere`"),
        ({"together": True, "calibrate": True, "elsewhere": (ELSEWHERE,)}, "leave out calibrate"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes, message):
    variants = tuple(Variant(**each) for each in VARIANTS)
    given = {"scenario": "x", "seeds": (0, 1), "dense": "dense", "silent": "other", "variants": variants}
    with pytest.raises(ValueError, match=message):
        Study(**given | changes)


# Trainings that are reused --------------------------------------------------------------------------------------------

STUDY = Path(__file__).resolve().parents[2] / "scenarios" / "studies" / "rivals-gpt.toml"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the shipped study with two variants and two seeds, and the trainings that were made, as they are made."""
    made = []

    def train(module, arguments):
        assert module == "gsreal.statistics.together"
        for job in json.loads(Path(arguments[0]).read_text()):
            seed = int(next(each for each in job["overrides"] if each.startswith("run.seed=")).partition("=")[2])
            made.append((job["out"].rpartition("/")[2], seed))
            evaluations = [
                {"step": step, "loss": 5.0 - 0.01 * step - seed / 10, "accuracy_ratio": None} for step in (0, 96)
            ]
            done = {"job": job, "evaluations": evaluations, "densities": [0.25, 0.75], "sent_bytes": []}
            Path(job["out"]).parent.mkdir(exist_ok=True)
            Path(job["out"]).write_text(json.dumps(done))

    monkeypatch.setattr(rivals, "run_module", train)
    monkeypatch.setattr(rivals, "inputs_of", lambda _loaded, _out: ())
    monkeypatch.setattr(rivals, "say", lambda _text: None)
    whole = load_study(STUDY, seeds=2)
    variants = tuple(each for each in whole.study.variants if each.name in ("dense", "half, bf16"))
    study = replace(whole.study, variants=variants, silent="dense", reuse=None, elsewhere=whole.study.elsewhere[:1])
    return replace(whole, study=study), made


def test_a_study_goes_on_from_the_courses_of_an_earlier_one(small, tmp_path):
    loaded, made = small
    courses = train_together(loaded, tmp_path / "first")
    assert made == [("dense.0.json", 0), ("half-bf16.0.json", 0), ("dense.1.json", 1), ("half-bf16.1.json", 1)]
    assert [each.density for each in courses] == [0.5, 0.5]
    train_together(loaded, tmp_path / "first")  # nothing anew
    file = tmp_path / "first" / "courses.json"
    local_sgd = next(each for each in load_study(STUDY).study.variants if each.name == "LocalSGD, 8 steps")
    more = replace(loaded.study, variants=(*loaded.study.variants, local_sgd), reuse=str(file.parent))
    made.clear()
    grown = train_together(replace(loaded, study=more), tmp_path / "second")
    assert made == [("localsgd-8-steps.0.json", 0), ("localsgd-8-steps.1.json", 1)]
    assert grown[:2] == courses
    made.clear()
    train_together(replace(loaded, study=more), tmp_path / "second", again=True)
    assert len(made) == 6


def test_a_training_of_another_scenario_is_not_reused(small, tmp_path):
    loaded, made = small
    train_together(loaded, tmp_path)
    for other in (
        replace(loaded, overrides=("workload.learning_rate=1e-4",)),
        replace(loaded, study=replace(loaded.study, unequal_ratio=0.25)),
    ):
        made.clear()
        train_together(other, tmp_path)
        assert len(made) == 4


@pytest.mark.parametrize("name", ["rivals-gpt", pytest.param("rivals-resnet", marks=pytest.mark.slow)])
def test_the_shipped_studies_have_all_their_trainings(name, tmp_path):
    loaded = load_study(STUDY.with_name(f"{name}.toml"))
    kept = {each.key for each in read_courses(loaded)}
    jobs = jobs_of(loaded, tmp_path)
    assert {rivals._key(job) for job in jobs.values()} == kept
    assert len(kept) == len(loaded.study.variants) * len(loaded.study.seeds)


@pytest.mark.parametrize("name", [pytest.param("rivals-gpt", marks=pytest.mark.slow), "rivals-resnet"])
def test_gradient_statistics_of_an_earlier_run_are_used_again(name, tmp_path, monkeypatch):
    def fail(arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(study_module, "_gsreal", fail)
    (given,) = inputs_of(load_study(STUDY.with_name(f"{name}.toml")), tmp_path / name)
    shipped = STUDY.parents[1] / "measured" / "studies" / name / "gradients.json"
    assert (tmp_path / name / "gradients.json").read_bytes() == shipped.read_bytes()
    assert given == f'workload.gradients="{tmp_path / name / "gradients.json"}"'


def test_a_file_that_holds_no_courses_is_told(tmp_path):
    (tmp_path / "courses.json").write_text('{"schema": "gssim.courses/1", "trainings": [{"losses": []}]}')
    text = STUDY.read_text().replace("../measured/studies/rivals-gpt", ".")
    text = text.replace('"../demo.toml"', json.dumps(str(STUDY.parents[1] / "demo.toml")))
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(UserError, match=r"courses\.json: trainings\[0\]"):
        read_courses(load_study(tmp_path / "study.toml"))
    (tmp_path / "courses.json").unlink()
    with pytest.raises(UserError, match=r"reuse = '\.': no folder beside it with courses\.json"):
        load_study(tmp_path / "study.toml")


# Time to an equal loss -----------------------------------------------------------------------------------------------

NAMES = ("dense", "LocalSGD, 8 steps", "GS, threshold inf")


def test_steps_to_a_loss_are_linear_between_evaluations():
    assert steps_to(2.5, (0, 10, 20), (4.0, 3.0, 2.0)) == 15
    assert steps_to(5.0, (0, 10), (4.0, 3.0)) == 0
    assert steps_to(3.5, (0, 10, 20), (4.0, 3.0, 4.0)) == 5  # the first time counts
    assert steps_to(1.0, (0, 10), (4.0, 3.0)) == math.inf


def test_the_equal_loss_of_a_seed_is_what_dense_has_after_a_third_of_its_steps():
    steps = steps_to_equal_loss(ALL, "dense")
    assert steps["dense"] == pytest.approx((100 / 3,) * 3)
    # dense falls from 5 to 1, 1.1 and 0.9, a third of it by 4, 3.9 and 4.1 thirds; pushed by 2, 1.9 and 2.1 in all
    assert steps["pushed"] == pytest.approx((100 * 4 / 6, 100 * 3.9 / 5.7, 100 * 4.1 / 6.3))
    assert steps["silent"] == (math.inf,) * 3
    idle = course("dense", ends=(5.0, 5.0, 5.0), step_bytes=1.0, step_time_s=1.0)
    with pytest.raises(UserError, match="map: the loss of 'dense' is not below the first one after a third"):
        steps_to_equal_loss([idle], "dense")


@pytest.fixture(scope="module")
def mapped():
    """Return the shipped study with three variants, their courses, and a map: two networks, two sets of devices."""
    whole = load_study(STUDY)
    variants = tuple(each for each in whole.study.variants if each.name in NAMES)
    loaded = replace(whole, study=replace(whole.study, variants=variants))
    ends = {"dense": (1.0, 1.1, 0.9), "LocalSGD, 8 steps": (2.3, 2.4, 2.2), "GS, threshold inf": (2.5, 2.6, 2.4)}
    courses = [
        replace(
            course(name, ends=ends[name], step_bytes=1.0, step_time_s=1.0, density=0.0 if "GS" in name else None),
            variant=next(each for each in variants if each.name == name),
        )
        for name in NAMES
    ]
    asked = Map(bandwidth_bytes_per_s=(1e5, 1e12), latency_s=(0.0,), slow_ratio=(1.0, 3.0))
    short = ('workload.gradients="transferred"', "run.steps=8")  # which are a period
    return loaded, courses, map_points(loaded, courses, short, asked)


def test_where_links_bound_a_step_times_to_the_loss_are_those_of_the_bytes(mapped):
    _, courses, points = mapped
    steps = steps_to_equal_loss(courses, "dense")
    slow_link, fast_link = points[:2]
    assert (slow_link.bandwidth_bytes_per_s, fast_link.bandwidth_bytes_per_s) == (1e5, 1e12)
    # LocalSGD sends the parameters once in eight steps
    ratio = slow_link.step_time_s["dense"] / slow_link.step_time_s["LocalSGD, 8 steps"]
    assert ratio == pytest.approx(8, rel=0.02)
    assert slow_link.times_s["dense"] == pytest.approx([n * slow_link.step_time_s["dense"] for n in steps["dense"]])
    assert (slow_link.fastest, fast_link.fastest) == ("LocalSGD, 8 steps", "dense")
    assert fast_link.over_fastest("dense") == 1
    assert fast_link.is_level("dense")
    assert not slow_link.is_level("dense")


def test_a_slow_device_has_fewer_samples_and_longer_steps(mapped):
    _, _, points = mapped
    equal, unequal = points[1], points[3]
    assert unequal.slow_ratio == 3
    # of 16 samples 5, 5, 4 and 2 instead of 4 each; the slow rank takes as long as for 6
    for name in NAMES:
        assert 1.1 < unequal.step_time_s[name] / equal.step_time_s[name] < 2


def test_a_map_is_told_in_sentences_a_table_and_a_picture(mapped):
    loaded, courses, points = mapped
    assert pushed_variants(courses, loaded.study.silent) == []
    said = map_findings(points, ["GS, threshold inf"])
    assert said[0].startswith("With equal devices, fastest to the equal loss on 2 networks: ")
    assert "With one device 3 times slower" in said[2]
    assert len(write_map(points).splitlines()) == 1 + len(points) * len(NAMES)
    drawn = charts.equal_loss_map(points, ["GS, threshold inf"], said)
    titles = [axes.get_title(loc="left") for axes in drawn.figure.axes]
    assert titles == ["Equal devices", "One device 3 times slower"]
    (legend,) = drawn.figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {point.fastest for point in points}
    colour_of = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    axes = drawn.figure.axes[0]
    assert [patch.get_facecolor() for patch in axes.patches] == [colour_of[point.fastest] for point in points[:2]]
    ratios = [point.over_fastest("GS, threshold inf") for point in points[:2]]
    assert [text.get_text() for text in axes.texts] == [f"{ratio:.3g}" for ratio in ratios]


def test_a_map_without_thresholds_or_with_some_that_do_not_get_there_says_so(mapped):
    _, _, points = mapped
    assert [sentence.split(",")[0] for sentence in map_findings(points, [])] == [
        "With equal devices",
        "With one device 3 times slower than the others",
    ]
    silent = "GS, threshold inf"
    never = [replace(point, times_s=dict(point.times_s) | {silent: (math.inf, 1.0, 1.0)}) for point in points]
    said = map_findings(never, [silent])
    assert "no variant of it reaches that loss from every seed" in said[1]
    assert ",,,False,False" in write_map(never)
    for ours, inside in (([], ""), ([silent], "-")):
        texts = [text.get_text() for text in charts.equal_loss_map(never, ours, said).figure.axes[0].texts]
        assert texts == [inside, inside]


# Further models ------------------------------------------------------------------------------------------------------

LARGE = FurtherModel(
    name="GPT-2 124M on A100",
    set={
        "cluster": "clusters/a100-4-hosts-links.toml",
        "workload": {"model": "models/gpt2-124m.toml", "sequence_length": 1024, "global_batch_size": 32},
        "run": {"steps": 2},
    },
)
PUSHES = ("dense", "GS, 1e-3", "GS, 1e-3, publish 0.5")
SHORT = ('workload.gradients="transferred"', "run.steps=2")
"""Under a threshold every step is simulated by itself, and what is compared is the typical one."""


@pytest.fixture(scope="module")
def larger():
    """Return the shipped study with two thresholds, their courses, and a map of two models on two networks."""
    whole = load_study(STUDY)
    variants = tuple(each for each in whole.study.variants if each.name in (*PUSHES, whole.study.silent))
    loaded = replace(whole, study=replace(whole.study, variants=variants))
    densities = dict.fromkeys(PUSHES[1:], 0.12) | {whole.study.silent: 0.0}
    courses = [
        replace(
            course(each.name, ends=(2.0, 2.1, 1.9), step_bytes=1.0, step_time_s=1.0, density=densities.get(each.name)),
            variant=each,
        )
        for each in variants
    ]
    asked = Map(bandwidth_bytes_per_s=(1e7, 1e12), latency_s=(0.0,), models=(LARGE,))
    return loaded, courses, map_points(loaded, courses, SHORT, asked)


def test_a_threshold_of_a_larger_model_pushes_the_density_that_was_counted(larger):
    loaded, courses, points = larger
    dense, pushed, published, silent = (carried_over(each, LARGE, loaded.study.silent) for each in courses)
    assert pushed == published == (*dense, "plan.push.kind=target-density", "plan.push.threshold=0.12")
    assert silent == dense  # which pushes nothing, of any model
    # on a slow link a step takes as long as its messages: all gradients, or 0.12 with a bit for each, and parameters
    slow = points[2]
    assert slow.model == LARGE.name
    ratio = slow.step_time_s["GS, 1e-3"] / slow.step_time_s["dense"]
    assert ratio == pytest.approx((0.12 + 1 / 32 + 1) / 2, rel=0.02)
    for name in PUSHES:  # the steps are those of the study's own model
        steps = [time_s / slow.step_time_s[name] for time_s in slow.times_s[name]]
        assert steps == pytest.approx([time_s / points[0].step_time_s[name] for time_s in points[0].times_s[name]])


def test_bands_are_of_what_the_density_of_pushes_leaves_open(larger):
    _, _, points = larger
    assert not points[0].step_time_band_s  # statistics of the study's own model have a band elsewhere
    slow = points[2]
    low, high = slow.step_time_band_s["GS, 1e-3"]
    assert low == pytest.approx(high, rel=0.05)  # the target holds the density, whatever the gradients' scale
    low, high = slow.step_time_band_s["GS, 1e-3, publish 0.5"]
    assert high > 1.2 * low
    assert "dense" not in slow.step_time_band_s
    for end, is_high in ((low, False), (high, True)):
        at = slow.at_end(high=is_high)
        assert at.step_time_s["GS, 1e-3, publish 0.5"] == end
        factor = end / slow.step_time_s["GS, 1e-3, publish 0.5"]
        assert at.times_s["GS, 1e-3, publish 0.5"] == pytest.approx(
            [factor * time_s for time_s in slow.times_s["GS, 1e-3, publish 0.5"]]
        )
        assert at.times_s["dense"] == slow.times_s["dense"]


def test_a_map_of_several_models_tells_them_apart_and_what_it_assumes(larger):
    loaded, courses, points = larger
    ours = pushed_variants(courses, loaded.study.silent)
    said = map_findings(points, ours)
    assert said[2].startswith("GPT-2 124M on A100, with equal devices, fastest to the equal loss on 2 networks: ")
    assert "by the band of transferred gradient statistics" in said[3]
    assert said[-1].startswith(
        "Not trained: GPT-2 124M on A100; that a method needs so many times dense's steps is assumed"
    )
    drawn = charts.equal_loss_map(points, ours, said)
    titles = [axes.get_title(loc="left") for axes in drawn.figure.axes]
    assert titles == ["gpt-byte-150k: equal devices", "GPT-2 124M on A100: equal devices"]
    notes = " ".join(text.get_text() for text in drawn.figure.texts)
    assert "measured on gpt-byte-150k alone" in notes
    assert "transferred" in notes
    lines = write_map(points).splitlines()
    assert [line.partition(",")[0] for line in lines[1::8]] == ["gpt-byte-150k", "GPT-2 124M on A100"]


@pytest.mark.slow
def test_what_does_not_fit_does_not_get_to_the_loss():
    whole = load_study(STUDY)
    large = replace(
        LARGE,
        set={
            "cluster": tomllib.loads((STUDY.parents[1] / "clusters" / "a100-4-hosts-links.toml").read_text())
            | {"device_types": {"a100-sxm-80": "rtx2080ti"}},
            "workload": {"model": "models/gpt2-774m.toml", "sequence_length": 256, "global_batch_size": 4},
            "run": {"steps": 6},
        },
    )
    variants = tuple(each for each in whole.study.variants if each.name in ("dense", "GS, 1e-3", whole.study.silent))
    loaded = replace(whole, study=replace(whole.study, variants=variants))
    courses = [
        replace(course(each.name, ends=(2.0, 2.1, 1.9), step_bytes=1.0, step_time_s=1.0, density=density), variant=each)
        for each, density in zip(variants, (None, 0.12, 0.0), strict=True)
    ]
    asked = Map(bandwidth_bytes_per_s=(1e9, 1e12), latency_s=(0.0,), models=(large,))
    points = map_points(loaded, courses, SHORT, asked)
    assert not points[0].unfit
    assert points[2].unfit == {"dense"}  # replicas of the optimizer's state; Gradient Sharding divides it
    assert points[2].times_s["dense"] == (math.inf,) * 3
    assert points[2].fastest.startswith("GS")
    assert "these do not fit in the devices' memory: dense" in " ".join(map_findings(points, []))
    assert sum(",False,False" in line and ",dense,False," in line for line in write_map(points).splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": {"global_batch_size": 32}}, r"map\.models 'large': set: workload\.model is missing"),
        ({"workload": {"model": "models/none.toml"}}, r"map\.models 'large': variant 'dense': .*none\.toml"),
        (
            {"cluster": "clusters/two-cores.toml", "workload": {"model": "models/gpt2-124m.toml"}},
            "its cluster has 2 ranks; needed: 4, as the study trains",
        ),
    ],
)
def test_a_further_model_that_cannot_be_asked_about_is_refused(changes, message, tmp_path):
    given = tomllib.loads(STUDY.read_text(encoding="utf-8"))
    given["map"]["models"] = [{"name": "large", "set": changes}]
    given["scenario"] = str(STUDY.parents[1] / "demo.toml")
    del given["reuse"]
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps(given))
    with pytest.raises(UserError, match=message):
        load_study(file)


def test_further_models_are_told_apart_by_name():
    with pytest.raises(ValueError, match="models: two are named alike"):
        Map(bandwidth_bytes_per_s=(1.0, 2.0), latency_s=(0.0,), models=(LARGE, LARGE))


def test_an_unknown_key_of_a_map_is_told_with_those_that_there_are():
    given = tomllib.loads(STUDY.read_text(encoding="utf-8"))
    given["map"]["latency_ms"] = [1]
    with pytest.raises(UserError, match=r"map\.latency_ms: unknown key; did you mean latency_s\? allowed: bandwidth"):
        validated(Study, given, file="study.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth_bytes_per_s": (1.0, 1.0)}, "must ascend"),
        ({"latency_s": (1.0, 0.5)}, "must ascend"),
    ],
)
def test_a_map_whose_axes_do_not_ascend_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Map(**{"bandwidth_bytes_per_s": (1.0, 2.0), "latency_s": (0.0,)} | changes)
