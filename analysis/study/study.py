"""Studies: a scenario, its variants with their controls, the seeds of each variant, and their trainings.

Each training is a process of `gsreal run`; finished ones are reused by later runs.
"""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gssim.errors import RunFailedError, UserError, one_line
from gssim.execution import FileStore
from gssim.execution.cache import Shared
from gssim.execution.files import write_text
from gssim.execution.parent import die_with_parent
from gssim.result import Result, read_result
from gssim.scenario import Loaded, check_kind, load_scenario, read_toml
from gssim.scenario.overrides import as_overrides
from gssim.simulation import simulate
from gssim.units import BytesPerSecond, Count, Seconds, TimeRatio, human_seconds, spec, validated

FEWEST_SEEDS = 2
"""Fewest seeds of a study, since an interval needs two; the shipped studies have five."""

COURSES, STATISTICS = "courses.json", "gradients.json"
"""Files of a study's folder: all its trainings, where ranks are trained together, and its gradient statistics."""

LEAST_DENSITY = 1e-6
"""Least target density of `density_of`, used where nothing reached the threshold of the other variant."""


@spec
class Variant:
    """One way to train; everything else is the study's."""

    name: str
    """Name in tables and charts."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys."""
    control: bool = False
    """Whether the others are judged by it; charts draw it in another way."""
    density_of: str | None = None
    """Name of an earlier variant: this one pushes a target density, the mean one that was measured there, seed by
    seed."""


@spec
class Elsewhere:
    """Another network to predict step times for, beside the machine that trains: the same devices, other links."""

    name: str
    """Name in tables and charts."""
    bandwidth_bytes_per_s: BytesPerSecond
    """Bandwidth of every link, in one direction."""
    latency_s: Seconds
    """Latency of every link."""


@spec
class FurtherModel:
    """A model of the map besides the one that the study trains, with devices and batches that suit it."""

    name: str
    """Name in tables and charts: the model, and on what it is trained."""
    set: dict[str, Any]
    """Overrides of every variant: `workload.model`, the cluster, the batch, ... As many ranks as the study trains."""


@spec
class Map:
    """Networks, devices and models for which the time to an equal loss is predicted, every combination of the lists."""

    bandwidth_bytes_per_s: Annotated[tuple[BytesPerSecond, ...], Field(min_length=2)]
    """Bandwidths of every link, in one direction; ascending."""
    latency_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Latencies of every link; ascending."""
    slow_ratio: Annotated[tuple[TimeRatio, ...], Field(min_length=1)] = (1.0,)
    """Compute time of the last rank's device over that of the others. Samples are divided in proportion to speed."""
    models: tuple[FurtherModel, ...] = ()
    """Models besides the study's own. None is trained: the steps that a variant needs, relative to dense, are assumed
    to be those of the study's trainings. Thresholded pushes send the fraction of the gradients that was counted there
    (`plan.push.kind = "target-density"`), since the same threshold would be another fraction in another model. Gradient
    statistics are those transferred from the model's family, with their band, unless `set` names others."""

    def __post_init__(self) -> None:
        """Check that values ascend, as the axes of the map do, and that the models' names differ."""
        names = [slug(model.name) for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"models: two are named alike, of {names}; names must differ in letters or digits")
        for key in ("bandwidth_bytes_per_s", "latency_s", "slow_ratio"):
            given = getattr(self, key)
            if list(given) != sorted(set(given)):
                raise ValueError(f"{key} = {list(given)}: must ascend, each value once")


@spec
class Study:
    """A comparison of trainings. Every variant is trained from each seed: same initial parameters, same batches."""

    scenario: str
    """The file that variants override, beside this one."""
    seeds: Annotated[tuple[Count, ...], Field(min_length=FEWEST_SEEDS)]
    """Each trains every variant once."""
    dense: str
    """Name of the control that everything is compared with: all gradients are pushed."""
    silent: str
    """Name of the control that pushes nothing (threshold inf). A variant that is no better has no use for its push."""
    variants: tuple[Variant, ...]
    """The trainings that are compared, controls included."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides for all variants: run length, batch, sequence length, ..."""
    calibrate: bool = False
    """Whether to measure this machine first, at the study's shapes, for predictions; else the scenario's cluster is
    taken."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Other networks to predict for."""
    together: bool = False
    """Whether all ranks are trained in one process, in turn and without messages: many seeds in little time. Losses are
    those of real runs; times are predicted, for the networks of `elsewhere` alone."""
    reuse: str | None = None
    """With `together`: folder of an earlier run, beside this file. Its trainings of the same scenarios (`courses.json`)
    and its gradient statistics (`gradients.json`) are used again: only what is new or changed is trained."""
    map: Map | None = None
    """With `together`: on which network which variant is the first at the loss of dense after a third of its steps."""
    unequal_ratio: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """With `together`: fraction of every rank's samples that are of its own kind. Each batch's first samples, so many
    in all, are sorted (images by class, texts by their mean id) and divided in that order; the others as drawn."""

    def __post_init__(self) -> None:
        """Check that names are unique and refer to variants."""
        names = [variant.name for variant in self.variants]
        for key, given in (("variants", names), ("elsewhere", [each.name for each in self.elsewhere])):
            twice = sorted({slug(name) for name in given if [slug(n) for n in given].count(slug(name)) > 1})
            if twice:
                raise ValueError(f"{key}: two are named '{twice[0]}'; names must differ in letters or digits")
        self._check_together()
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {list(self.seeds)}: each may be given once")
        for key, name in (("dense", self.dense), ("silent", self.silent)):
            if name not in names:
                raise ValueError(f"{key} = '{name}': no variant has this name; there are {', '.join(names)}")
        if all(variant.control for variant in self.variants):
            raise ValueError("variants: all are controls; one is needed that is not")
        for place, variant in enumerate(self.variants):
            if variant.density_of is not None and variant.density_of not in names[:place]:
                raise ValueError(f"density_of = '{variant.density_of}': no variant before '{variant.name}' is so named")

    def _check_together(self) -> None:
        if self.unequal_ratio and not self.together:
            raise ValueError(f"unequal_ratio = {self.unequal_ratio}: needs together = true")
        if self.reuse and not self.together:
            raise ValueError(f"reuse = '{self.reuse}': needs together = true")
        if self.map and not self.together:
            raise ValueError("map: needs together = true")
        if self.together and (self.calibrate or not self.elsewhere):
            raise ValueError("together = true: step times are not measured; leave out calibrate, and list `elsewhere`")
        if self.together and any(variant.density_of for variant in self.variants):
            raise ValueError("density_of: not with together = true, whose variants are trained in one go")


@dataclass(frozen=True, kw_only=True)
class LoadedStudy:
    """A study with its file; all its scenarios were loaded once and are valid."""

    file: Path
    study: Study
    overrides: tuple[str, ...]
    """Overrides of the command line, applied after those of the file."""
    shared: Shared = field(default_factory=Shared, compare=False, repr=False)
    """Cache of the parts that its scenarios have in common: most have one cluster and one model."""

    @property
    def scenario_file(self) -> Path:
        """The scenario that variants override."""
        return self.file.parent / self.study.scenario

    def overrides_of(self, variant: Variant, *, seed: int, density: float | None = None) -> list[str]:
        """Return the overrides of a training of the variant; `density`: the one measured for `density_of`."""
        overrides = [*as_overrides(self.study.set), *self.overrides, *as_overrides(variant.set)]
        if variant.density_of is not None:
            # before it is measured, any density serves to load the scenario; 0 is not valid
            target = 1.0 if density is None else float(f"{max(density, LEAST_DENSITY):.3g}")
            overrides += ["plan.push.kind=target-density", f"plan.push.threshold={target!r}"]
        return [*overrides, f"run.seed={seed}", f"name={json.dumps(slug(variant.name))}"]

    def load(
        self,
        variant: Variant,
        *,
        seed: int,
        density: float | None = None,
        extra: tuple[str, ...] = (),
        predicts: bool = False,
    ) -> Loaded:
        """Return the scenario of one training, with gradient statistics where it `predicts`.

        Raises UserError for an invalid scenario.
        """
        overrides = [*self.overrides_of(variant, seed=seed, density=density), *extra]
        return load_scenario(self.scenario_file, overrides, gradients_needed=predicts, shared=self.shared)


def load_study(path: Path, overrides: tuple[str, ...] = (), *, seeds: int | None = None) -> LoadedStudy:
    """Return the study in the TOML file `path`, with its first `seeds` seeds; raise UserError for invalid input.

    Every variant's scenario is loaded, so that errors show before any training.
    """
    data = read_toml(path)[1]
    check_kind(data, "study", str(path))
    study = validated(Study, data, file=str(path))
    if seeds is not None:
        if not FEWEST_SEEDS <= seeds <= len(study.seeds):
            raise UserError(f"--seeds {seeds}: must be from {FEWEST_SEEDS} to {len(study.seeds)}, those of {path}")
        study = replace(study, seeds=study.seeds[:seeds])
    loaded = LoadedStudy(file=path, study=study, overrides=overrides)
    if not loaded.scenario_file.is_file():
        raise UserError(f"{path}: scenario = '{study.scenario}': no such file beside it")
    if study.reuse is not None and not (path.parent / study.reuse / COURSES).is_file():
        raise UserError(f"{path}: reuse = '{study.reuse}': no folder beside it with {COURSES}")
    for place, variant in enumerate(study.variants):
        try:
            scenario = loaded.load(variant, seed=study.seeds[0]).scenario
        except UserError as error:
            raise UserError(f"{path}: variants[{place}] '{variant.name}': {error}") from None
        _check(scenario, variant, study, f"{path}: variants[{place}] '{variant.name}'")
        if study.elsewhere and not scenario.cluster.links:
            raise UserError(f"{path}: elsewhere: the cluster lists no links that could be others; leave it out")
        for model in study.map.models if study.map else ():
            _check_model(loaded, variant, model, ranks=scenario.ranks)
    return loaded


def _check_model(loaded: LoadedStudy, variant: Variant, model: FurtherModel, *, ranks: int) -> None:
    """Raise UserError where a variant with a further model is no valid scenario, or another than the map can ask."""
    where = f"{loaded.file}: map.models '{model.name}'"
    overrides = tuple(as_overrides(model.set))
    if not any(each.partition("=")[0] == "workload.model" for each in overrides):
        raise UserError(f"{where}: set: workload.model is missing, which makes it another model")
    try:
        scenario = loaded.load(variant, seed=loaded.study.seeds[0], extra=overrides).scenario
    except UserError as error:
        raise UserError(f"{where}: variant '{variant.name}': {error}") from None
    if scenario.ranks != ranks:
        raise UserError(f"{where}: its cluster has {scenario.ranks} ranks; needed: {ranks}, as the study trains")
    if not scenario.cluster.links:
        raise UserError(f"{where}: its cluster lists no links that could be others; needed: one with `links`")


def on_network(loaded: Loaded, network: Elsewhere) -> Loaded:
    """Return the scenario with the links of another network; compute costs stay the same."""
    cluster = loaded.scenario.cluster
    speed: dict[str, Any] = {"bandwidth_bytes_per_s": network.bandwidth_bytes_per_s, "latency_s": network.latency_s}
    links = tuple(replace(link, **speed, source=f"assumed: {network.name}") for link in cluster.links)
    cluster = replace(cluster, links=links)
    return replace(loaded, scenario=replace(loaded.scenario, cluster=cluster))


def _check(scenario: Any, variant: Variant, study: Study, where: str) -> None:
    push, run = scenario.plan.push, scenario.run
    if run.evaluate_every_steps is None:
        raise UserError(f"{where}: run.evaluate_every_steps: missing; a study compares losses on held-out data")
    if variant.name == study.dense and push.threshold is not None:
        raise UserError(f"{where}: plan.push.threshold = {push.threshold}: the variant 'dense' names must have none")
    if variant.name == study.silent and push.threshold != math.inf:
        raise UserError(f"{where}: plan.push.threshold = {push.threshold}: must be inf: 'silent' names this variant")
    if variant.density_of is not None and scenario.policies.gradients != "push":
        raise UserError(f"{where}: plan.method = '{scenario.plan.method}': density_of needs a method that pushes")


def slug(name: str) -> str:
    """Return a name in a form that is safe in file names.

    >>> slug("threshold 1e-3, error feedback")
    'threshold-1e-3-error-feedback'
    """
    words = "".join(c if c.isascii() and (c.isalnum() or c == "-") else " " for c in name.lower()).split()
    return "-".join(words) or "unnamed"


# Trainings ------------------------------------------------------------------------------------------------------------

GRACE_S = 30.0
"""Time that a command has to end after an interrupt, in which it stops its ranks."""
KEPT_PARTS = ("workload", "plan", "run", "network")
"""Parts of a scenario that must be equal for a Result to be reused; the others are part of its id."""
HERE = "this machine"


@dataclass(frozen=True)
class Trained:
    """A variant's trainings, one for each of the study's seeds, and the predictions for the first."""

    variant: Variant
    results: tuple[Result, ...]
    predictions: dict[str, Result]
    """Prediction by network: this machine, and the networks of `elsewhere`."""


def train(loaded: LoadedStudy, out: Path, *, again: bool = False) -> list[Trained]:
    """Return every variant's trainings and predictions; a training that `out` has is reused, unless `again`.

    It is reused whatever version of the code it ran with (see its provenance); predictions are always made anew.
    All variants of a seed are trained before the next seed, so that a drift of the machine affects all of them.
    """
    study = loaded.study
    cluster = [f"cluster={json.dumps(str(_calibrated(loaded, out)))}"] if study.calibrate else []
    dense = next(variant for variant in study.variants if variant.name == study.dense)
    statistics = statistics_of(loaded, dense, cluster, out)
    inputs = (*cluster, f"workload.gradients={json.dumps(str(statistics))}")
    results: dict[tuple[str, int], Result] = {}
    trainings = _Trainings(loaded, inputs, out, again=again)
    for seed in study.seeds:
        for variant in study.variants:
            density = results[variant.density_of, seed].density.push if variant.density_of else None
            results[variant.name, seed] = trainings.result(variant, seed, density)
    return [
        Trained(
            variant,
            tuple(results[variant.name, seed] for seed in study.seeds),
            _predictions(loaded, variant, results, inputs, out),
        )
        for variant in study.variants
    ]


# Before the trainings ------------------------------------------------------------------------------------------------


def _calibrated(loaded: LoadedStudy, out: Path) -> Path:
    """Return the cluster file of this machine, calibrated at the study's shapes."""
    file = out / "cluster.toml"
    if file.exists():
        return file
    scenarios = [loaded.load(variant, seed=0).scenario for variant in loaded.study.variants]
    sizes = {max(1, n // each.plan.micro_batches) for each in scenarios for n in each.batch_sizes if n}
    workload = scenarios[0].workload
    arguments = [str(_model_file(loaded)), "--ranks", str(max(each.ranks for each in scenarios))]
    arguments += ["--batch-sizes", ",".join(map(str, sorted(sizes))), "--precision", workload.precision]
    if workload.sequence_length:
        arguments += ["--sequence-length", str(workload.sequence_length)]
    say("measures this machine (gsreal calibrate)")
    _gsreal(["calibrate", *arguments, "--out", str(file)])
    return file


def _model_file(loaded: LoadedStudy) -> Path:
    """Return the file of the model that all variants train; raise UserError where it is not given as a file."""
    pairs = [override.partition("=") for override in (*as_overrides(loaded.study.set), *loaded.overrides)]
    given = {key.strip(): value.strip().strip('"') for key, _, value in pairs}.get("workload.model")
    name = given or read_toml(loaded.scenario_file)[1]["workload"]["model"]
    candidates = [Path(name), loaded.scenario_file.parent / name] if isinstance(name, str) else []
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        raise UserError(f"{loaded.file}: calibrate = true: needs a model file to measure; workload.model names none")
    return file


def statistics_of(loaded: LoadedStudy, trained: Variant, inputs: Sequence[str], out: Path) -> Path:
    """Return the file of gradient statistics for predictions, from a seed that no variant is trained with.

    `trained`: the variant whose plan says which elements a rank owns; it is trained densely.
    """
    file, study = out / STATISTICS, loaded.study
    thresholded = [v for v in study.variants if loaded.load(v, seed=0).statistics_needed]
    extra = (*inputs, f"workload.gradients={json.dumps(str(file))}")
    if file.exists():
        with suppress(UserError):  # statistics that do not suit the variants are taken again
            for variant in thresholded:
                loaded.load(variant, seed=study.seeds[0], extra=extra, predicts=True)
            return file
    arguments = [str(loaded.scenario_file)]
    for override in [*loaded.overrides_of(trained, seed=max(study.seeds) + 1), *inputs]:
        arguments += ["--set", override]
    say("takes gradient statistics, of another seed (gsreal gradients)")
    _gsreal(["gradients", *arguments, "--out", str(file)])
    for variant in thresholded:  # refused now, not after all trainings
        loaded.load(variant, seed=study.seeds[0], extra=extra, predicts=True)
    return file


# Trainings -----------------------------------------------------------------------------------------------------------


class _Trainings:
    """Runs the trainings of a study, or takes those of an earlier call; prints them with the remaining time."""

    def __init__(self, loaded: LoadedStudy, inputs: Sequence[str], out: Path, *, again: bool) -> None:
        self.loaded, self.inputs, self.again = loaded, tuple(inputs), again
        self.folder = out / "results"
        self.store = trainings_in(self.folder)
        self.total = len(loaded.study.seeds) * len(loaded.study.variants)
        self.done = self.ran = 0
        self.began_s = time.monotonic()

    def result(self, variant: Variant, seed: int, density: float | None) -> Result:
        """Return the Result of one training, reused or new."""
        asked = self.loaded.load(variant, seed=seed, density=density, extra=self.inputs).scenario
        name = f"{asked.name}.{asked.scenario_id}.measured.json"
        self.done += 1
        if not self.again and (kept := self.store.kept(name, key_of(asked.scenario_id, asked.resolved()))):
            return kept
        self._announce(f"{variant.name}, seed {seed}")
        arguments = [str(self.loaded.scenario_file)]
        for override in [*self.loaded.overrides_of(variant, seed=seed, density=density), *self.inputs]:
            arguments += ["--set", override]
        _gsreal(["run", *arguments, "--out", str(self.folder)])
        self.ran += 1
        return read_result(self.folder / name)

    def _announce(self, what: str) -> None:
        each_s = (time.monotonic() - self.began_s) / self.ran if self.ran else None
        left = self.total - self.done + 1
        rest = "" if each_s is None else f" (about {human_seconds(each_s * left)} left)"
        say(f"training {self.done} of {self.total}: {what}{rest}")


def trainings_in(folder: Path) -> FileStore[Result]:
    """Return the store of a study's trainings, whatever code ran them."""
    return FileStore(folder, read_result, Result.to_json, lambda result: key_of(result.scenario_id, result.scenario))


def key_of(scenario_id: str, scenario: Mapping[str, Any]) -> object:
    """Return the key of a training: the scenario's id, and those of its tables that decide what is trained."""
    left_out = ("gradients", "model")  # a path, and what is part of the id
    tables = [scenario.get(part) for part in KEPT_PARTS]
    kept = [
        {key: value for key, value in table.items() if key not in left_out} if isinstance(table, dict) else table
        for table in tables
    ]
    return scenario_id, json.dumps(kept, sort_keys=True)


def _gsreal(arguments: Sequence[str]) -> None:
    """Run a command of `gsreal`."""
    _run([sys.executable, "-c", "from gsreal.cli import main; main()", *arguments], f"gsreal {arguments[0]}")


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments...`."""
    _run([sys.executable, "-m", module, *arguments], module)


def _run(command: Sequence[str], name: str) -> None:
    """Run a command; if it fails, raise an error with its last line. An interrupt is passed on to it.

    It ends with this process, however this one ends: beside what the next call measures it would take time on cores.
    """
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # in a session of its own, so that an interrupt from the terminal reaches it only once, from here
    ends = partial(die_with_parent, signal.SIGTERM)
    with subprocess.Popen(command, start_new_session=True, preexec_fn=ends, **streams) as process:
        try:
            _, talk = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        lines = talk.strip().splitlines()
        reason = lines[-1].removeprefix("gsreal: ") if lines else f"exit code {process.returncode}"
        raise UserError(reason) if process.returncode == 2 else RunFailedError(f"{name}: {reason}")


# Predictions ---------------------------------------------------------------------------------------------------------


def _predictions(
    loaded: LoadedStudy, variant: Variant, results: dict[tuple[str, int], Result], inputs: tuple[str, ...], out: Path
) -> dict[str, Result]:
    """Return the predictions for the variant's first training, by network; each is also written to a file."""
    seed = loaded.study.seeds[0]
    density = results[variant.density_of, seed].density.push if variant.density_of else None
    predictions = {}
    here = loaded.load(variant, seed=seed, density=density, extra=inputs, predicts=True)
    asked = {HERE: here} | {network.name: on_network(here, network) for network in loaded.study.elsewhere}
    for name, question in asked.items():
        result = simulate(question).result
        predictions[name] = result
        folder = out / "results" if name == HERE else out / "elsewhere" / slug(name)
        write_text(folder / f"{question.scenario.name}.{result.scenario_id}.simulated.json", result.to_json())
    return predictions


def say(text: str) -> None:
    """Print progress to stderr."""
    print(one_line(f"analysis: {text}"), file=sys.stderr, flush=True)
