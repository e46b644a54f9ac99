"""Study files: a scenario, its variants with their controls, and the seeds that each variant is trained with."""

import json
import math
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gssim.errors import UserError
from gssim.scenario import Loaded, as_overrides, load_scenario, read_toml
from gssim.units import BytesPerSecond, Count, Seconds, spec, validated

FEWEST_SEEDS = 2
"""Fewest seeds of a study, since an interval needs two; the shipped studies have five."""

LEAST_DENSITY = 1e-6
"""Least target density of `density_of`, used where nothing reached the threshold of the other variant."""


@spec
class Variant:
    """One way to train; everything else is the study's."""

    name: str
    """In tables and charts."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys."""
    control: bool = False
    """Whether it is there to judge the others by; charts draw it apart."""
    density_of: str | None = None
    """Name of an earlier variant: this one pushes a target density, the mean one that was measured there, seed by
    seed."""


@spec
class Elsewhere:
    """Another network to predict step times for, beside the machine that trains: the same devices, other links."""

    name: str
    """In tables and charts."""
    bandwidth_bytes_per_s: BytesPerSecond
    """Of every link, in one direction."""
    latency_s: Seconds
    """Of every link."""


@spec
class Study:
    """What is compared. Every variant is trained from each seed: the same initial parameters, the same batches."""

    scenario: str
    """The file that variants override, beside this one."""
    seeds: Annotated[tuple[Count, ...], Field(min_length=FEWEST_SEEDS)]
    """Each trains every variant once."""
    dense: str
    """Name of the control that everything is compared with: all gradients are pushed."""
    silent: str
    """Name of the control that pushes nothing (threshold inf): what does no better has no use for its push."""
    variants: tuple[Variant, ...]
    """What is compared, controls included."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides for all variants: run length, batch, sequence length, ..."""
    calibrate: bool = False
    """Whether to measure this machine first, at the study's shapes, for predictions; else the scenario's cluster is
    taken."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Other networks to predict for."""

    def __post_init__(self) -> None:
        """Check that names are unique and refer to variants."""
        names = [variant.name for variant in self.variants]
        for key, given in (("variants", names), ("elsewhere", [each.name for each in self.elsewhere])):
            twice = sorted({slug(name) for name in given if [slug(n) for n in given].count(slug(name)) > 1})
            if twice:
                raise ValueError(f"{key}: two are named '{twice[0]}'; names must differ in letters or digits")
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


@spec
class LoadedStudy:
    """A study with its file; all its scenarios were loaded once and are valid."""

    file: Path
    study: Study
    overrides: tuple[str, ...]
    """Overrides of the command line, applied after those of the file."""

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
        return load_scenario(self.scenario_file, overrides, gradients_needed=predicts)


def load_study(path: Path, overrides: tuple[str, ...] = (), *, seeds: int | None = None) -> LoadedStudy:
    """Return the study in the TOML file `path`, with its first `seeds` seeds; raise UserError for invalid input.

    Every variant's scenario is loaded, so that errors show before any training.
    """
    study = validated(Study, read_toml(path)[1], file=str(path))
    if seeds is not None:
        if not FEWEST_SEEDS <= seeds <= len(study.seeds):
            raise UserError(f"--seeds {seeds}: must be from {FEWEST_SEEDS} to {len(study.seeds)}, those of {path}")
        study = replace(study, seeds=study.seeds[:seeds])
    loaded = LoadedStudy(file=path, study=study, overrides=overrides)
    if not loaded.scenario_file.is_file():
        raise UserError(f"{path}: scenario = '{study.scenario}': no such file beside it")
    for place, variant in enumerate(study.variants):
        try:
            scenario = loaded.load(variant, seed=study.seeds[0]).scenario
        except UserError as error:
            raise UserError(f"{path}: variants[{place}] '{variant.name}': {error}") from None
        _check(scenario, variant, study, f"{path}: variants[{place}] '{variant.name}'")
        if study.elsewhere and not scenario.cluster.links:
            raise UserError(f"{path}: elsewhere: the cluster lists no links that could be others; leave it out")
    return loaded


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
