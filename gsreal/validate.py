"""Validates predictions on this machine: calibrates it, runs the points of a sweep on it, predicts and compares them.

Everything goes to one folder: the machine's cluster file, gradient statistics where thresholds need them, a Result of
each point from both sides, and at the end the comparison, its charts and a page. What is finished is kept: the same
command goes on after an interrupt. `gssim` and `analysis` do their parts as commands.

Runs take place in the order of the sweep. Communication and wrappers (DDP, FSDP2) are measured just before the first
run that needs them; a run of method `single` on one rank does not. The speed of a shared machine drifts within minutes:
layers are measured before and after the runs, and again between them if those take long, and a run that waited for its
cores is repeated at the end, if there is time.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gsreal.calibrate.bench import Settings, busy_text
from gsreal.calibrate.cluster_file import (
    averaged,
    cluster_data,
    measure,
    read_previous,
    with_communication,
    write_cluster,
)
from gsreal.calibrate.communication import all_reduce_kind
from gsreal.machine import device_name, usable_cores
from gsreal.model_files.build import set_trust
from gsreal.model_files.trace import write_model
from gsreal.run.checks import check_real
from gsreal.run.forked import Forked, import_modules, module_run
from gsreal.run.launch import Guard, launch
from gssim.errors import RunFailedError, UserError, one_line
from gssim.execution import FileStore
from gssim.execution.files import locked, scratch_folder, write_text
from gssim.execution.parent import die_with_parent
from gssim.result import BUSY_RATIO, DRIFT_RATIO, Result, file_name, read_result
from gssim.scenario import Loaded, load_cluster, reduce_precision
from gssim.scenario.sweep import SEPARATOR, Point, chosen, load_sweep, loaded_point, points_of
from gssim.units import human_seconds, signed_percent

LOCK = ".gsreal-validate.lock"
ROUNDS = 3
"""Times that layers are measured at most: before, halfway through, and after the runs."""
DRIFTS_AFTER_S = 180.0
"""Time after which layers are measured again halfway through the runs."""
LAYER_ROUNDS = 2
"""Rounds of each such measurement: together they are as many as those of `gsreal calibrate`."""
LINK_REPEATS = 11
"""Repeats of each message and collective at each size, and steps of each wrapper: about half as many as `gsreal
calibrate` takes. They suffice: a line is fitted through six sizes, and medians of steps are taken.
"""
MOST_BATCH_SIZES = 3
FINISH_S = 40.0
"""Time kept for predicting all points, comparing them and drawing the charts."""
COURSES = 2
"""Trainings from which gradient statistics are taken."""


@dataclass(frozen=True)
class Request:
    """Arguments of `gsreal validate`."""

    sweep: Path
    out: Path
    kind: str
    """Kind of the devices: cpu or cuda."""
    ranks: int
    """Number of devices of the machine's cluster; plans take all of them, or `plan.ranks`."""
    only: tuple[str, ...] = ()
    seconds: float | None = None
    """Time after which no further run is started."""
    trust_code: bool = False


def validate(request: Request) -> None:
    """Do all that the request asks for and the folder lacks; print the comparison.

    Raises RunFailedError at the end if a run failed; the same command repeats it.
    """
    began_s = time.monotonic()
    set_trust(request.trust_code)
    import_modules()
    with locked(request.out / LOCK, place=str(request.out)):
        session = Session(request, began_s)
        session.run_all()
        session.finish()


@dataclass
class Row:
    """A point of the sweep, and its measurement, if there is one."""

    point: Point
    loaded: Loaded
    measured: Result | None = None

    @property
    def name(self) -> str:
        """Name of the point."""
        return self.point.name

    @property
    def busy_ratio(self) -> float:
        """Part of the measured steps that a rank waited for a core; 0 where it is unknown."""
        return busy_ratio(self.measured) if self.measured else 0.0


class Session:
    """One call of the command: the rows, the calibration, and the time that is left."""

    def __init__(self, request: Request, began_s: float) -> None:
        self.request, self.began_s, self.out = request, began_s, request.out
        self.results, self.cluster = self.out / "results", self.out / "cluster.toml"
        self.sweep = request.sweep
        self.device, self.forks = device_and_forks(request.kind)
        # this machine is not measured yet: any cluster of as many equal devices has the same plans
        self.left_out: dict[str, str] = {}
        shapes = self.loaded_points(unmeasured(request.kind, request.ranks))
        for name, reason in self.left_out.items():
            self.say(f"{name} is left out: {reason}")
        self.settings = settings_of([loaded for _, loaded in shapes], request.kind, self.out)
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.layers_measured_s = -math.inf
        """When this call measured the layers last, by `time.monotonic`."""

    def _points(self, cluster: str) -> tuple[Point, ...]:
        """Return the chosen points on a cluster, named as in the sweep file, without the group if there is only one.

        Raises UserError if a point names a cluster: the machine's own is used.
        """
        sweep = load_sweep(self.sweep)
        points = []
        for point in points_of(sweep, file=self.sweep):
            if any(override.startswith("cluster=") for override in point.overrides):
                raise UserError(f"{self.sweep}: {point.name}: cluster: validate runs points on this machine's cluster")
            name = point.name.removeprefix(f"{point.group}{SEPARATOR}") if len(sweep.groups) < 2 else point.name
            overrides = (f"cluster={cluster}", *point.overrides, f"name={json.dumps(name)}")
            points.append(replace(point, name=name, overrides=overrides))
        return chosen(points, self.request.only, file=self.sweep)

    def loaded_points(self, cluster: str) -> list[tuple[Point, Loaded]]:
        """Return the points that this machine can run; the others' reasons are in `left_out`.

        Raises UserError if it can run none.
        """
        pairs = []
        for point in self._points(cluster):
            try:
                loaded = point.load(gradients_needed=False)
                check_real(loaded)
                pairs.append((point, loaded))
            except UserError as error:
                self.left_out[point.name] = str(error)
        if not pairs:
            name, reason = next(iter(self.left_out.items()))
            raise UserError(f"{self.sweep}: {name}: {reason}")
        return pairs

    # Steps ------------------------------------------------------------------------------------------------------------

    def run_all(self) -> None:
        """Calibrate and run all that is missing, interleaved, until there is no time left."""
        self.calibrate()
        rows = self.rows = self.load_rows()
        missing = [row for row in rows if row.measured is None]
        if len(missing) < len(rows):
            self.say(f"{len(rows) - len(missing)} of {len(rows)} are there already")
        done_s: list[float] = []
        for number, row in enumerate(missing):
            if self.is_over():
                self.say(f"the time is over (--seconds): {len(missing) - number} runs are left to the next call")
                return
            if row.loaded.scenario.ranks > 1 or row.loaded.scenario.plan.method != "single":  # which may be wrapped too
                self.calibrate_links()
            if number == (len(missing) + 1) // 2 and time.monotonic() - self.layers_measured_s > DRIFTS_AFTER_S:
                self.calibrate_again()
            start_s = time.monotonic()
            self.measure(row)
            done_s.append(time.monotonic() - start_s)
            left_s = sum(done_s) / len(done_s) * (len(missing) - number - 1)
            left = f", about {left_s:.0f} s of runs left" if left_s else ""
            self.say(f"{number + 1} of {len(missing)} runs done{left}")
        if not self.is_over():
            self.calibrate_again()
        for row in rows:
            if row.busy_ratio > BUSY_RATIO and not self.is_over():
                self.say(f"{row.name}: the machine was busy ({row.busy_ratio:.0%} of the time): once more")
                self.measure(row)

    def calibrate(self) -> None:
        """Write the cluster file of this machine, unless it is there with all that the points need."""
        if self.cluster.exists():
            read_previous(self.cluster, self.device)  # raises UserError if it is of another machine
            cluster, wanted = load_cluster(self.cluster), self.settings
            device = cluster.device_types[self.device]
            sizes = {
                profile.model: next(iter(profile.layers.values())).forward_s.sizes
                for profile in device.profiles
                if profile.precision == wanted.precision
            }
            models = {Path(file).stem for file in wanted.models}
            if (
                len(cluster.devices) == self.request.ranks
                and models <= {*sizes}
                and all(sizes[model][0] <= size <= sizes[model][-1] for model in models for size in wanted.batch_sizes)
                and {*wanted.optimizers} <= {*device.optimizers}
                and (not wanted.low_rank or (device.compression and device.compression.low_rank))
            ):
                # it may be of other points of the sweep: repeated measurements need the same batch sizes as the first
                self.settings = replace(wanted, batch_sizes=tuple(map(int, sizes[min(models)])))
                return
        self.say("calibrating this machine: arithmetic, memory, layers")
        measured = measure(replace(self.settings, only="devices"), ranks=self.request.ranks, forked=self.forks)
        self.layers_measured_s = time.monotonic()
        ratio = measured.get("core_wait_ratio", 0.0)
        if ratio > BUSY_RATIO and self.forks:  # ranks that are no forks have said so
            self.say(f"{busy_text(ratio)} (without {self.cluster}, the next call calibrates anew)")
        write_cluster(self.cluster, cluster_data(measured, self.settings))

    def calibrate_links(self) -> None:
        """Add messages and wrappers to the cluster file, unless they are there."""
        before = read_previous(self.cluster, self.device)
        measured_kinds = before.get("backend_cost", {}).get("overhead_s", {})
        if measured_kinds and {*map(all_reduce_kind, self.settings.summed_precisions)} <= measured_kinds.keys():
            return
        self.say("calibrating communication")
        measured = measure(replace(self.settings, only="links"), ranks=self.request.ranks, forked=self.forks)
        write_cluster(self.cluster, with_communication(before, measured))

    def calibrate_again(self) -> None:
        """Average another measurement of the layers into the cluster file, up to `ROUNDS` of them."""
        before = read_previous(self.cluster, self.device)
        counts = [
            profile.get("measurements", 1) for kind in before["device_types"].values() for profile in kind["profiles"]
        ]
        if min(counts, default=ROUNDS) >= ROUNDS:
            return
        self.say("calibrating layers again, for a machine drifts")
        measured = measure(
            replace(self.settings, only="layers", lasting=False), ranks=self.request.ranks, forked=self.forks
        )
        self.layers_measured_s = time.monotonic()
        write_cluster(self.cluster, averaged(before, measured, where=str(self.cluster)))

    def load_rows(self) -> list[Row]:
        """Return the points on this machine's cluster, with the measurements that are there."""
        self.store = FileStore(self.results, read_result, Result.to_json, lambda result: result.scenario_id)
        rows = []
        for point, loaded in self.loaded_points(str(self.cluster.absolute())):
            row = Row(self.with_statistics(point, loaded), loaded)
            row.measured = self.store.kept(self.file_of(row), loaded.scenario.scenario_id)
            rows.append(row)
        return rows

    def with_statistics(self, point: Point, loaded: Loaded) -> Point:
        """Return the point with gradient statistics of its own training, where it needs some and names none."""
        try:
            point.load()
            return point
        except UserError as error:
            if "workload.gradients" not in str(error):
                raise UserError(f"{self.sweep}: {point.name}: {error}") from None
        workload = loaded.scenario.workload
        file = self.out / f"gradients-{workload.model.name}-{workload.global_batch_size}.json"
        taken = replace(point, overrides=(*point.overrides, f"workload.gradients={file.absolute()}"))
        if not file.exists():
            self.say(f"training {workload.model.name} for its gradient statistics")
            words = [str(point.file), *set_words(point.overrides), "--courses", str(COURSES), "--out", str(file)]
            run_module("gsreal", ["gradients", *words])
        loaded_point(taken, file=self.sweep)
        return taken

    def measure(self, row: Row) -> None:
        """Run a row's ranks; print the Result beside the prediction, and keep it if ranks waited less than before."""
        self.say(f"running {row.name}")
        with scratch_folder("gsreal-run-") as folder:
            file = Path(folder, "measured.json")
            arguments = [str(row.point.file), json.dumps(row.point.overrides), str(file), "", "", "0"]
            try:
                launch(
                    "gsreal.run.worker", arguments, ranks=row.loaded.scenario.ranks, guard=Guard(), forked=self.forks
                )
            except RunFailedError as error:
                self.failed.append(row.name)
                self.say(f"{row.name}: failed: {error}")
                return
            measured = read_result(file)
        if row.measured is None or busy_ratio(measured) < row.busy_ratio:
            row.measured = measured
            self.store.keep(self.file_of(row), measured)
        predicted = self.predict(row)
        if predicted is not None:
            self.say(f"{row.name}: {pair_line(predicted, measured)}")

    def predict(self, row: Row) -> Result | None:
        """Return the prediction with the calibration so far; None if it fails, which is reported at the end."""
        with scratch_folder("gsreal-run-") as folder:
            try:
                run_module("gssim", ["run", str(row.point.file), *set_words(row.point.overrides), "--out", str(folder)])
                (file,) = Path(folder).glob("*.json")
                return read_result(file)
            except (RunFailedError, ValueError):
                return None

    def finish(self) -> None:
        """Predict every measured row with the whole calibration, and compare: tables, charts and a page."""
        measured = [row for row in self.rows if row.measured is not None]
        if not measured:
            raise RunFailedError("validate: nothing was measured; the same command goes on")
        self.say(f"predicting {len(measured)} points, and comparing")
        lines = [["run", str(row.point.file), *set_words(row.point.overrides)] for row in measured]
        run_modules("gssim", [[*line, "--out", str(self.results)] for line in lines])
        # both at the same time, because each takes one core some seconds; the output of the page's command comes last
        words = (["compare", self.results, "--out", self.out], ["report", self.results, "--out", self.page])
        both = [
            subprocess.Popen(
                [sys.executable, "-m", "analysis", *map(str, each)],
                stdout=subprocess.PIPE if each[0] == "report" else None,
                preexec_fn=die_with_parent,  # the next call writes there too
            )
            for each in words
        ]
        for (name, *_), process in zip(words, both, strict=True):
            output, _ = process.communicate()
            print((output or b"").decode(), end="", flush=True)
            if process.returncode:
                raise RunFailedError(f"validate: python -m analysis {name} ended with status {process.returncode}")
        left = [row.name for row in self.rows if row.measured is None and row.name not in self.failed]
        if left:
            self.say(f"not run for lack of time: {', '.join(left)}; the same command goes on")
        if self.failed:
            raise RunFailedError(f"validate: failed: {', '.join(self.failed)}; the same command tries them again")

    # Parts ------------------------------------------------------------------------------------------------------------

    @property
    def page(self) -> Path:
        """The page of the comparison."""
        return self.out / "report.html"

    def file_of(self, row: Row) -> str:
        """Return the name of the file of a row's measurement."""
        scenario = row.loaded.scenario
        return file_name(scenario.name, scenario.scenario_id, "measured")

    def is_over(self) -> bool:
        """Return whether there is no time for more than the comparison."""
        asked = self.request.seconds
        return asked is not None and time.monotonic() - self.began_s > asked - FINISH_S

    def say(self, line: str) -> None:
        """Print a line of progress with the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self.began_s), 60)
        print(f"gsreal: {minutes}:{seconds:02d} {one_line(line)}", file=sys.stderr, flush=True)


def unmeasured(kind: str, ranks: int) -> str:
    """Return a cluster of equal devices as inline TOML, of which nothing is known but the number."""
    rates = "{fp64=1, fp32=1, bf16=1, fp16=1}"
    about = f'{{kind="{kind}", memory_bytes=1e18, peak_flop_per_s={rates}, memory_bandwidth_bytes_per_s=1, source="-"}}'
    devices = ", ".join(f'{{name="d{i}", type="any", host="h"}}' for i in range(ranks))
    links = ", ".join(
        f'{{between=["d{i}", "s"], bandwidth_bytes_per_s=1, latency_s=0, source="-"}}' for i in range(ranks)
    )
    return (
        f'{{name="unmeasured", backend="gloo", source="-", switches=["s"], device_types={{any={about}}}, '
        f"devices=[{devices}], links=[{links}]}}"
    )


def settings_of(shapes: Sequence[Loaded], kind: str, out: Path) -> Settings:
    """Return the settings of a calibration for some scenarios: their models, and the batch sizes of their ranks.

    The models are written to `out/models`. Raises UserError where the scenarios have several sequence lengths or
    precisions: a calibration has one of each.
    """
    workloads = [each.scenario.workload for each in shapes]
    lengths = sorted({each.sequence_length for each in workloads if each.sequence_length is not None})
    precisions = sorted({each.precision for each in workloads})
    for name, values in (("sequence_length", lengths), ("precision", precisions)):
        if len(values) > 1:
            raise UserError(
                f"validate: points with workload.{name} = {', '.join(map(str, values))}: a calibration is for one "
                "of them; select its points by --only"
            )
    summed: set[str | None] = {reduce_precision(each) for each in workloads}
    summed |= {each.scenario.policies.compress for each in shapes}
    models = {workload.model.name: workload.model for workload in workloads}
    files = []
    for name, model in models.items():
        files.append(out / "models" / f"{name}.toml")
        write_model(files[-1], model)
    sizes = sorted(
        {
            max(1, size // each.scenario.plan.micro_batches)
            for each in shapes
            for size in each.scenario.batch_sizes
            if size
        }
    )
    return Settings(
        models=tuple(map(str, files)),
        batch_sizes=spread(sizes, MOST_BATCH_SIZES),
        sequence_length=lengths[0] if lengths else 1,
        precision=precisions[0],
        kind=kind,
        rounds=LAYER_ROUNDS,
        link_repeats=LINK_REPEATS,
        summed_precisions=tuple(each for each in ("bf16", "fp16") if each in summed),
        low_rank=any(each.scenario.policies.compressor == "powersgd" for each in shapes),
        most_elements=max(model.elements for model in models.values()),
        optimizers=tuple(sorted({each.optimizer if each.optimizer != "muon" else "adamw" for each in workloads})),
    )


def spread(values: Sequence[int], most: int) -> tuple[int, ...]:
    """Return at most `most` of some increasing values: the ends, and between them those nearest to a geometric series.

    >>> spread([4, 6, 8, 10, 16], 3)
    (4, 8, 16)
    """
    if len(values) <= most:
        return tuple(values)
    ratio = (values[-1] / values[0]) ** (1 / (most - 1))
    wanted = [values[0] * ratio**i for i in range(most)]
    return tuple(sorted({min(values, key=lambda value: abs(value - each)) for each in wanted}))


def busy_ratio(result: Result) -> float:
    """Return the part of a measurement's steps that its ranks waited for a core; 0 where it is unknown."""
    return float(result.provenance.get("core_wait_ratio", 0.0))


def pair_line(predicted: Result, measured: Result) -> str:
    """Return one line on a prediction and its measurement."""
    step = predicted.step_time_s / measured.step_time_s - 1
    peaks = [max(entry.peak_allocated_bytes for entry in each.ranks) for each in (predicted, measured)]
    same = [entry.key for entry in predicted.collectives] == [entry.key for entry in measured.collectives]
    speed_ratio = measured.provenance.get("device_speed_ratio", 1.0)
    drifted = f"; the machine computed at {speed_ratio:.0%} of the calibrated rate"
    return (
        f"step predicted {human_seconds(predicted.step_time_s)}, measured {human_seconds(measured.step_time_s)} "
        f"({signed_percent(step)}%); peak memory {signed_percent(peaks[0] / peaks[1] - 1)}%; "
        f"collectives {'equal' if same else 'differ'}{drifted if abs(speed_ratio - 1) > DRIFT_RATIO else ''}"
    )


def set_words(overrides: Sequence[str]) -> list[str]:
    """Return overrides as words of a command line."""
    return [word for override in overrides for word in ("--set", override)]


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a command of the project in a fork of this process; raise RunFailedError with its last line if it fails."""
    run_modules(module, [arguments])


def run_modules(module: str, commands: Sequence[Sequence[str]]) -> None:
    """Run commands of the project in forks of this process, as many at once as it has cores.

    Raises RunFailedError with the last line of the first that fails.
    """
    with scratch_folder("gsreal-run-") as folder:
        logs = [Path(folder, f"log-{number}.txt") for number in range(len(commands))]
        processes: list[Forked] = []
        cores = len(usable_cores())
        try:
            for command, log in zip(commands, logs, strict=True):
                if len(processes) >= cores:
                    processes[-cores].wait()
                processes.append(Forked(module_run(module, command, {}), log))
            for command, process, log in zip(commands, processes, logs, strict=True):
                if code := process.wait():
                    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    raise RunFailedError(f"{module} {command[0]}: {lines[-1] if lines else f'exit status {code}'}")
        finally:
            for process in processes:
                process.kill()


def device_and_forks(kind: str) -> tuple[str, bool]:
    """Return the name of this machine's devices, and whether ranks can be forks of this process.

    CUDA does not survive a fork, and torch may have initialised it here to count devices (without NVML it does). So a
    fork tries CUDA first; this process uses it only if that fails.
    """
    device = torch.device(kind)
    if kind == "cpu":
        return device_name(device), True
    with scratch_folder("gsreal-run-") as folder:
        name = Path(folder, "name")

        def use_device() -> None:
            weight = torch.ones(64, 64, device=device, requires_grad=True)
            (weight @ weight).sum().backward()
            write_text(name, device_name(device))

        with suppress(RunFailedError):  # this process cannot be forked
            if not Forked(use_device, Path(folder, "log.txt")).wait():
                return name.read_text(encoding="utf-8"), True
    return device_name(device), False


def device_kind(asked: str) -> str:
    """Return the kind of device for `--device`: cpu, cuda, or auto; raise UserError where there is none."""
    has_gpu = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if has_gpu else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UserError(f"--device {asked}: allowed: auto, cpu, cuda")
    if asked == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no GPU that torch can use")
    return asked


def default_ranks(kind: str, sweep: Path) -> int:
    """Return the number of ranks to validate with: two cores, or all GPUs.

    A single GPU is shared by as many ranks as the sweep's largest plan asks for, or by four if no plan says. All of
    them have the models that they calibrate in its memory.
    """
    if kind == "cpu":
        return min(2, len(usable_cores()))
    if torch.cuda.device_count() > 1:
        return torch.cuda.device_count()
    key = "plan.ranks="
    points = points_of(load_sweep(sweep), file=sweep)
    return max(
        (int(each.removeprefix(key)) for point in points for each in point.overrides if each.startswith(key)), default=4
    )
