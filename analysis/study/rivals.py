"""Studies that train all ranks in one process: methods beside one another at equal samples, bytes and time.

Each method's held-out loss is read from its course, linear between evaluations, where it has trained as many samples,
sent as many bytes, or taken as much time as the others. Bytes of data-dependent messages are those counted in training;
all others, and all times, are a simulation's for the networks of `elsewhere`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from analysis.study.findings import interval, percentage
from analysis.study.rows import Effect, Spread, csv_of_lines, paired_difference, spread
from analysis.study.study import (
    COURSES,
    STATISTICS,
    LoadedStudy,
    Study,
    Variant,
    on_network,
    run_module,
    say,
    slug,
    statistics_of,
)
from gssim.execution.cache import Shared
from gssim.execution.files import read_json, read_text, write_text
from gssim.result import Result
from gssim.scenario import Scenario
from gssim.simulation import simulate
from gssim.units import Count, human_bytes, human_seconds, spec, validated

BYTES_RATIO = 0.25
"""Losses are compared at this fraction of the bytes that dense sends in all its steps."""
SAMPLES, BYTES = "equal samples", "equal bytes"


@dataclass(frozen=True)
class Course:
    """A variant trained from every seed."""

    variant: Variant
    steps: tuple[int, ...]
    """Steps after which it was evaluated; 0 is before the first."""
    losses: tuple[tuple[float, ...], ...]
    """Held-out loss by seed, at these steps."""
    accuracies: tuple[float, ...]
    """Accuracy at the end, by seed; empty where samples are not classified."""
    density: float | None
    """Mean fraction of other owners' elements that was pushed."""
    step_bytes: float
    """Bytes that a rank sends in the mean step."""
    step_time_s: Mapping[str, float]
    """Predicted step time, by network."""
    predicted_density: float | None
    """Density for which these times were predicted, from statistics of ranks with similar data."""

    def at(self, step: float) -> list[float]:
        """Return the loss of every seed after `step` steps, or after the last step."""
        return [float(np.interp(step, self.steps, each)) for each in self.losses]

    @property
    def last(self) -> int:
        """Return the number of steps."""
        return self.steps[-1]


@spec
class Training:
    """A variant trained from one seed: what the study keeps of it."""

    overrides: tuple[str, ...]
    unequal_ratio: float
    scenario_id: str
    """These three fields identify a training."""
    steps: tuple[Count, ...]
    """Steps after which it was evaluated; 0 is before the first."""
    losses: tuple[float, ...]
    """Held-out loss at these steps."""
    accuracy_ratio: float | None
    """Accuracy at the end; None where samples are not classified."""
    density: float | None
    """Mean fraction of other owners' elements that was pushed; None where nothing is selected."""
    sent_bytes: float | None
    """Bytes that a rank sends in the mean step; None where they do not depend on the data."""

    @property
    def key(self) -> object:
        """Key of a training, by which one of an earlier run is found again."""
        return self.overrides, self.unequal_ratio, self.scenario_id


@spec
class Trainings:
    """The file `courses.json`: all trainings of a study."""

    schema: Literal["gssim.courses/1"]
    trainings: tuple[Training, ...]


def train_together(loaded: LoadedStudy, out: Path, *, again: bool = False) -> list[Course]:
    """Return the courses of all variants, and write their trainings to `courses.json`.

    Trainings that `out`, or the folder `reuse` of the study, has are used again, unless `again`.
    """
    study = loaded.study
    trained = _trainings(loaded, out, again=again)
    lines = ",\n".join(json.dumps(asdict(each)) for each in trained.values())  # a line each
    write_text(out / COURSES, f'{{"schema": "gssim.courses/1", "trainings": [\n{lines}\n]}}\n')
    inputs = inputs_of(loaded, out)
    courses: dict[str, Course] = {}
    for variant in dense_first(study):
        seen = [trained[variant.name, seed] for seed in study.seeds]
        here = loaded.load(variant, seed=study.seeds[0], extra=inputs, predicts=True)
        shared = Shared()
        predicted = {each.name: simulate(on_network(here, each), shared=shared).result for each in study.elsewhere}
        course = _course(variant, seen, predicted)
        ratio = dense_ratio(here.scenario)
        courses[variant.name] = _partly_dense(ratio, course, courses[study.dense]) if ratio else course
    return [courses[variant.name] for variant in study.variants]


def _trainings(loaded: LoadedStudy, out: Path, *, again: bool) -> dict[tuple[str, int], Training]:
    """Return the trainings by variant and seed: reused, or made in one process that writes each as it ends."""
    jobs = jobs_of(loaded, out)
    kept = {} if again else {each.key: each for each in read_courses(loaded)}
    for job in () if again else jobs.values():
        if Path(job["out"]).is_file() and (done := _training(job)):
            kept[done.key] = done
    missing = [job for job in jobs.values() if _key(job) not in kept]
    if len(missing) < len(jobs):
        say(f"{len(jobs) - len(missing)} trainings of {len(jobs)} are there already")
    if missing:
        say(f"{len(missing)} trainings of {len(jobs)}, all ranks of each in one process")
        write_text(out / "jobs.json", json.dumps(missing))
        run_module("gsreal.statistics.together", [str(out / "jobs.json")])
    for job in missing:
        done = _training(job)
        assert done is not None  # it was made just now
        kept[done.key] = done
    return {where: kept[_key(job)] for where, job in jobs.items()}


def jobs_of(loaded: LoadedStudy, out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return, by variant and seed, what `gsreal.statistics.together` is to train."""
    study = loaded.study
    scenarios = {variant.name: loaded.load(variant, seed=study.seeds[0]).scenario for variant in study.variants}
    jobs = {}
    for seed in study.seeds:
        for variant in study.variants:
            scenario = scenarios[variant.name]
            jobs[variant.name, seed] = {
                "file": str(loaded.scenario_file),
                "overrides": loaded.overrides_of(variant, seed=seed),
                "unequal_ratio": study.unequal_ratio,
                "scenario_id": replace(scenario, run=replace(scenario.run, seed=seed)).scenario_id,
                "out": str((out / "together" / f"{slug(variant.name)}.{seed}.json").resolve()),
            }
    return jobs


def _key(job: Mapping[str, Any]) -> object:
    return tuple(job["overrides"]), job["unequal_ratio"], job["scenario_id"]


def read_courses(loaded: LoadedStudy) -> tuple[Training, ...]:
    """Return the trainings in the folder that a study reuses; raise UserError where they are none."""
    if loaded.study.reuse is None:
        return ()
    path = loaded.file.parent / loaded.study.reuse / COURSES
    return validated(Trainings, read_json(path), file=str(path)).trainings


def _training(job: Mapping[str, Any]) -> Training | None:
    """Return the training in a job's file; None if the file is of another job."""
    seen = json.loads(Path(job["out"]).read_text(encoding="utf-8"))
    if any(seen["job"].get(key) != job[key] for key in ("overrides", "unequal_ratio", "scenario_id")):
        return None
    evaluations = seen["evaluations"]
    return Training(
        overrides=tuple(job["overrides"]),
        unequal_ratio=job["unequal_ratio"],
        scenario_id=job["scenario_id"],
        steps=tuple(each["step"] for each in evaluations),
        losses=tuple(each["loss"] for each in evaluations),
        accuracy_ratio=evaluations[-1]["accuracy_ratio"],
        density=fmean(seen["densities"]) if seen["densities"] else None,
        sent_bytes=fmean(seen["sent_bytes"]) if seen["sent_bytes"] else None,
    )


def _partly_dense(ratio: float, course: Course, dense: Course) -> Course:
    """Return a course with the bytes and times of a mean step, if the fraction `ratio` of all steps is like dense's."""
    times_s = {name: own_s + (dense.step_time_s[name] - own_s) * ratio for name, own_s in course.step_time_s.items()}
    sent = course.step_bytes + (dense.step_bytes - course.step_bytes) * ratio
    return replace(course, step_bytes=sent, step_time_s=times_s)


def inputs_of(loaded: LoadedStudy, out: Path) -> tuple[str, ...]:
    """Return the override that names the gradient statistics of a study's predictions; they are made where missing."""
    if loaded.study.reuse is not None and not (out / STATISTICS).exists():
        earlier = loaded.file.parent / loaded.study.reuse / STATISTICS
        if earlier.is_file():
            write_text(out / STATISTICS, read_text(earlier))
    silent = next(variant for variant in loaded.study.variants if variant.name == loaded.study.silent)
    return (f"workload.gradients={json.dumps(str(statistics_of(loaded, silent, [], out).resolve()))}",)


def dense_first(study: Study) -> list[Variant]:
    """Return a study's variants, dense before those whose first steps are like its own."""
    return sorted(study.variants, key=lambda variant: variant.name != study.dense)


def dense_ratio(scenario: Scenario) -> float:
    """Return the fraction of a run's steps that communicate as dense's do: the first ones of PowerSGD and of top-k."""
    starts = {"powersgd": scenario.plan.powersgd.start_step, "topk": scenario.plan.topk.start_step}
    whole_steps = starts.get(scenario.policies.compressor or "", 0)
    return whole_steps / (scenario.run.warmup_steps + scenario.run.steps)


def _course(variant: Variant, seen: Sequence[Training], predicted: Mapping[str, Result]) -> Course:
    first = next(iter(predicted.values()))
    ranks = sum(entry.count for entry in first.ranks)
    sent = sum((entry.bytes_sent or 0.0) * entry.count for entry in first.ranks) / ranks
    counted = [each.sent_bytes for each in seen if each.sent_bytes is not None]
    densities = [each.density for each in seen if each.density is not None]
    return Course(
        variant=variant,
        steps=seen[0].steps,
        losses=tuple(each.losses for each in seen),
        accuracies=tuple(each.accuracy_ratio for each in seen if each.accuracy_ratio is not None),
        density=fmean(densities) if densities else None,
        step_bytes=fmean(counted) if counted else sent,
        step_time_s={name: result.step_time_s for name, result in predicted.items()},
        predicted_density=first.density.push,
    )


# Read-outs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The losses of all variants at one budget."""

    name: str
    budget: str
    """The budget in words."""
    losses: Mapping[str, list[float]]
    """Losses by variant and seed."""
    best: str
    """Variant with the least mean loss; controls count."""
    level: tuple[str, ...]
    """Other variants whose loss is not significantly above the best's: the paired 95 % interval includes zero."""


def readings_of(courses: Sequence[Course], dense: str) -> list[Reading]:
    """Return the losses at equal samples, at equal bytes, and at equal time on each network.

    Bytes: `BYTES_RATIO` of dense's. Time: that in which the quickest variant has trained all its steps.
    """
    of_dense = next(each for each in courses if each.variant.name == dense)
    bytes_ = BYTES_RATIO * of_dense.last * of_dense.step_bytes
    readings = [_reading(SAMPLES, f"{of_dense.last} steps", {c.variant.name: c.at(c.last) for c in courses})]
    at = {c.variant.name: c.at(bytes_ / c.step_bytes) for c in courses}
    readings.append(_reading(BYTES, f"{human_bytes(bytes_)} sent by a rank", at))
    for network in of_dense.step_time_s:
        budget_s = min(c.last * c.step_time_s[network] for c in courses)
        at = {c.variant.name: c.at(budget_s / c.step_time_s[network]) for c in courses}
        readings.append(_reading(f"equal time, {network}", human_seconds(budget_s), at))
    return readings


def _reading(name: str, budget: str, losses: Mapping[str, list[float]]) -> Reading:
    best = min(losses, key=lambda each: fmean(losses[each]))
    others = [each for each in losses if each != best]
    level = [each for each in others if not paired_difference(losses[each], losses[best]).low > 0]
    return Reading(name, budget, losses, best, tuple(level))


def change_of(reading: Reading, variant: str, dense: str) -> Effect | None:
    """Return a variant's change of loss from dense's at the same budget; None for dense."""
    if variant == dense:
        return None
    return paired_difference(reading.losses[variant], reading.losses[dense])


def loss_of(reading: Reading, variant: str) -> Spread:
    """Return the mean and the spread over seeds of a variant's losses."""
    return spread(reading.losses[variant])


def findings(courses: Sequence[Course], dense: str, silent: str) -> list[str]:
    """Return the findings in sentences, also where Gradient Sharding loses."""
    readings = readings_of(courses, dense)
    sentences = []
    for reading in readings:
        best, level = reading.best, reading.level
        more = f"; not significantly worse: {', '.join(level)}" if level else "; all others are worse"
        sentences.append(
            f"At {reading.name} ({reading.budget}) '{best}' has the least loss, {_loss(reading, best)}{more}"
        )
    end = readings[0]
    control = change_of(end, silent, dense)
    assert control is not None  # it is another variant
    verdict = "pushing lowers the loss" if control.low > 0 else "this study shows no benefit of pushing"
    sentences.append(f"Pushing nothing changes the loss at the end by {interval(control)}: {verdict}")
    pushed = [c for c in courses if c.density is not None and c.variant.name != silent]
    for course in pushed:
        name = course.variant.name
        over = paired_difference(end.losses[name], end.losses[silent])
        change = change_of(end, name, dense)
        assert change is not None  # dense has no density
        use = "" if over.high < 0 else "; not significantly better than pushing nothing"
        predicted = course.predicted_density
        known = "" if predicted is None else f", times predicted for {percentage(predicted)}"
        sentences.append(
            f"'{name}' pushed {percentage(course.density or 0.0)} of the gradients{known}, sent "
            f"{human_bytes(course.step_bytes)} a step: loss at the end {interval(change)} from dense{use}"
        )
    ours = {course.variant.name for course in pushed}
    first = [r.name for r in readings if r.best in ours]
    near = [r.name for r in readings if r.best not in ours and ours & set(r.level)]
    lost = [r.name for r in readings if r.best not in ours and not ours & set(r.level)]
    sentences.append(
        f"Thresholded Gradient Sharding: best at {', '.join(first) or 'none'}; not significantly worse than the best "
        f"at {', '.join(near) or 'none'}; significantly worse at {', '.join(lost) or 'none'}"
    )
    return sentences


def _loss(reading: Reading, variant: str) -> str:
    value = loss_of(reading, variant)
    return f"{value.mean:.3f} nats (standard deviation over seeds {value.sd:.3f})"


def write_table(courses: Sequence[Course], dense: str) -> str:
    """Return a line for each variant as CSV: bytes, times, and the loss at every budget with its change from dense."""
    readings = readings_of(courses, dense)
    lines = []
    for course in courses:
        name = course.variant.name
        line: dict[str, Any] = {
            "variant": name,
            "control": course.variant.control,
            "seeds": len(course.losses),
            "steps": course.last,
            "push_density": course.density,
            "push_density_predicted": course.predicted_density,
            "sent_bytes": course.step_bytes,
            "accuracy_mean_ratio": fmean(course.accuracies) if course.accuracies else None,
        }
        line |= {f"step_time_predicted_s ({network})": time_s for network, time_s in course.step_time_s.items()}
        for reading in readings:
            value, change = loss_of(reading, name), change_of(reading, name, dense)
            line |= {f"loss ({reading.name})": value.mean, f"loss_sd ({reading.name})": value.sd}
            for key in ("mean", "low", "high"):
                line[f"loss_change_{key} ({reading.name})"] = None if change is None else getattr(change, key)
        lines.append(line)
    return csv_of_lines(lines)


def winners_table(courses: Sequence[Course], dense: str) -> str:
    """Return, in Markdown, which variant has the least loss at which budget: a row for each variant."""
    readings = readings_of(courses, dense)
    head = ["variant", "sent a step", *(f"{reading.name}: {reading.budget}" for reading in readings)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for course in courses:
        name = course.variant.name
        cells = [name, human_bytes(course.step_bytes)]
        for reading in readings:
            value = f"{loss_of(reading, name).mean:.3f}"
            cells.append(f"**{value}**" if name == reading.best else f"{value} ≈" if name in reading.level else value)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Mean held-out loss in nats. Bold: the least; ≈: not significantly worse (paired 95 % interval).", ""]
    return "\n".join(lines)
