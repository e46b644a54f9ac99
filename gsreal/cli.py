"""Command line of `gsreal`.

Trace models, calibrate this machine, take gradient statistics, and run scenarios for real.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gsreal.compiled import SCRATCH_KERNELS
from gsreal.run.progress import DEFAULT_TIMEOUT_S
from gssim.errors import UserError
from gssim.execution.files import locked, remove_abandoned, scratch_folder
from gssim.result import file_name
from gssim.terminal import (
    AsJson,
    Only,
    Overrides,
    ScenarioFile,
    Version,
    activity,
    run_command_line,
    unwinding,
    write_or_print,
)
from gssim.units import excess

if TYPE_CHECKING:
    from gsreal.calibrate.bench import Settings
    from gsreal.model_files.request import Request
    from gssim.result import Result
    from gssim.scenario import Loaded, Scenario

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="If no rank finishes a step for this time, end the run and name the rank that blocks it.",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Call any factory that a model file names; else only known ones."),
]


@app.callback()
def about(version: Version = False) -> None:
    """Execute scenarios with torch.distributed and measure them."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is missing: pip install 'gssim[real]'")


@app.command("run")
def run_command(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the Result's JSON file.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write one step's timeline (Chrome trace).")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Folder to save checkpoints in, and to resume from.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", help="Number of steps between checkpoints; by default 10.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", help="How often to restart all ranks if one dies.")
    ] = 0,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    interface: Annotated[
        str | None,
        typer.Option("--interface", help="Network interface on which ranks listen; the loopback's by default."),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Execute one scenario: one process a rank, on this machine, or on the nodes where torchrun or srun starts it.

    Calls the factory that the model file names.

    Example: gsreal run scenarios/demo.toml --set cluster=out/this.toml --out out/results
    """
    from gsreal.model_files.build import set_trust
    from gsreal.run.launch import Guard, launch, listening_on
    from gsreal.run.nodes import check_launcher, has_several_nodes, srun_environment
    from gsreal.run.rank import TIMEOUT, leave
    from gssim.result import read_result

    set_trust(trust_code)

    if every is not None:
        _check_positive("--every", every)
        if checkpoint is None:
            raise UserError(f"--every {every}: nothing is saved; name a folder with --checkpoint, or leave it out")
    every = every or 10
    _check_timeout(timeout_s)
    alone = listening_on(interface)
    os.environ.update(srun_environment(os.environ))
    loaded = _checked(scenario, overrides)
    ours = loaded.scenario
    name = file_name(ours.name, ours.scenario_id, "measured")
    _check_writable(trace, out and out / name)
    if max_restarts < 0 or (max_restarts and checkpoint is None):
        raise UserError(f"--max-restarts {max_restarts}: must be at least 0, and needs --checkpoint to resume from")
    if "RANK" not in os.environ and is_emulated(ours):
        text = "the file's devices are emulated ones: here each is a whole core, and links are this machine's"
        print(f"gsreal: {text}; `gsreal lab {scenario}` emulates them", file=sys.stderr)
    with scratch_folder("gsreal-run-") as folder, _checkpoint_lock(checkpoint) as locks:
        if checkpoint is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            from gsreal.run.checkpoint import check_checkpoints

            check_checkpoints(ours, checkpoint, every, where=loaded.file)
        file = Path(folder, name)
        arguments = [str(scenario), json.dumps(overrides or []), str(file), str(trace.absolute()) if trace else ""]
        arguments += [str(checkpoint.absolute()) if checkpoint else "", str(every)]
        if "RANK" in os.environ:  # torchrun or srun has started the ranks
            from gsreal.run import worker  # here alone: all that trains takes seconds to import

            os.environ[TIMEOUT] = str(timeout_s)
            if interface or not has_several_nodes():
                os.environ.update(alone)
            check_launcher(ours.ranks, where=loaded.file)
            worker.main(*arguments)
            leave()
            if os.environ["RANK"] != "0":
                return
        else:
            guard = Guard(timeout_s, interface, locks)
            launch("gsreal.run.worker", arguments, ranks=ours.ranks, max_restarts=max_restarts, guard=guard)
        result = read_result(file)
        text = file.read_text(encoding="utf-8")
    _write_result(result, text, out / name if out else None, as_json=as_json, changed=overrides or ())


@contextmanager
def _checkpoint_lock(folder: Path | None) -> Iterator[tuple[int, ...]]:
    """Lock a folder of checkpoints, and remove what killed runs left in it; yield the lock's file descriptor.

    Raises UserError if another run saves there. Of torchrun's ranks the first one takes the lock.
    """
    if folder is None or os.environ.get("RANK", "0") != "0":
        yield ()
        return
    from gsreal.run.checkpoint import LOCK, remove_leftovers

    if folder.exists() and not folder.is_dir():
        raise UserError(f"--checkpoint {folder}: is no folder")
    with locked(folder / LOCK, place=f"--checkpoint {folder}") as handle:
        try:
            yield (handle,)
        finally:
            remove_leftovers(folder)


def is_emulated(scenario: "Scenario") -> bool:
    """Return whether a rank's device is one that only the lab has."""
    return any(scenario.cluster.type_of(rank).lab for rank in range(scenario.ranks))


@app.command("lab")
def lab_command(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario whose cluster to emulate (needs root).")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the Result's JSON file; a sweep needs it, and resumes there."),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write one step's timeline (Chrome trace).")] = None,
    sweep: Annotated[
        Path | None,
        typer.Option("--sweep", help="Instead of a scenario: measure every point of this sweep that --out lacks."),
    ] = None,
    only: Only = None,
    again: Annotated[bool, typer.Option("--again", help="Also measure points again that --out already has.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Only remove the remains of killed runs.")] = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    trust_code: TrustCode = False,
) -> None:
    """Execute one scenario, or a sweep, on an emulated cluster: shaped links between namespaces, slowed-down cores.

    Calls the factory that each model file names.

    Example: gsreal lab scenarios/lab-two-sites.toml --out out/results
    """
    from gsreal.lab.building import check_tools
    from gsreal.model_files.build import set_trust

    set_trust(trust_code)
    if clean + (scenario is not None) + (sweep is not None) != 1:
        raise UserError("lab: give one of these: a scenario, --sweep, --clean")
    if only and sweep is None:
        raise UserError("lab: --only chooses points of a --sweep")
    if again and sweep is None:
        raise UserError("lab: --again is for a --sweep; a scenario is always measured")
    _check_timeout(timeout_s)
    check_tools()
    if sweep is not None:
        if out is None or trace is not None:
            raise UserError("lab: --sweep needs --out, and writes no --trace")
        _lab_sweep(sweep, overrides or [], only or [], out, timeout_s, as_json=as_json, again=again)
    elif scenario is not None:
        from gsreal.lab.lab import run_lab, warn_of_other_processors

        loaded = _checked(scenario, overrides)
        name = file_name(loaded.scenario.name, loaded.scenario.scenario_id, "measured")
        _check_writable(trace, out and out / name)
        warn_of_other_processors([loaded.scenario.cluster])
        result = run_lab(loaded, overrides or [], trace=trace, timeout_s=timeout_s)
        _write_result(result, result.to_json(), out / name if out else None, as_json=as_json, changed=overrides or ())
    else:
        _clean()


def _lab_sweep(
    file: Path, overrides: list[str], only: list[str], out: Path, timeout_s: float, *, as_json: bool, again: bool
) -> None:
    from gsreal.lab.lab import (
        LOCK,
        cells_of,
        check_points,
        measure_cells,
        median_results,
        run_lab,
        warn_of_other_processors,
    )
    from gssim.scenario.sweep import chosen, load_sweep, points_of
    from gssim.terminal import print_as_json, print_results

    _check_writable(out / file.name)
    sweep = load_sweep(file)
    points = chosen(points_of(sweep, file=file, overrides=overrides), only, file=file)
    loaded = check_points(points, sweep=file)
    warn_of_other_processors(each.scenario.cluster for each in loaded)
    cells = cells_of(points, loaded, repeats=sweep.repeats, out=out)
    with locked(out / LOCK, place=str(out)):
        results = measure_cells(
            cells, lambda cell: run_lab(cell.loaded, cell.point.overrides, timeout_s=timeout_s), again=again
        )
    if as_json:
        print_as_json(results)
    else:
        print_results(median_results(cells, results), sweep.question)


def _clean() -> None:
    from gsreal.lab.building import clean

    removed, alive = clean()
    folders = remove_abandoned()
    counts = f"dead runs removed: {len(removed)}; running, left alone: {len(alive)}"
    print(f"gsreal: lab: {counts}; temporary folders removed: {len(folders)}", file=sys.stderr)


def _checked(scenario: Path, overrides: list[str] | None) -> "Loaded":
    """Return a scenario that can run for real; raise UserError for one that cannot."""
    from gsreal.run.checks import check_real
    from gssim.scenario import load_scenario

    loaded = load_scenario(scenario, overrides or [], gradients_needed=False)
    check_real(loaded)
    return loaded


def _write_result(result: "Result", text: str, file: Path | None, *, as_json: bool, changed: Sequence[str]) -> None:
    """Write a Result to a file, if one is named, and print it."""
    from gssim.execution.files import write_text

    if file is not None:
        write_text(file, text)
    if as_json:
        sys.stdout.write(text)
    else:
        from gssim.terminal import print_result

        print_result(result, changed=changed)


@app.command("script")
def script_command(
    scenario: ScenarioFile,
    launcher: Annotated[
        str, typer.Option("--for", metavar="LAUNCHER", help="slurm, torchrun, kubernetes or skypilot.")
    ],
    overrides: Overrides = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image, for kubernetes.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; by default it is printed.")] = None,
) -> None:
    """Print what to submit to a launcher, so that `gsreal run` executes a scenario on its hosts. Starts nothing."""
    from gsreal.run.script import launch_script
    from gssim.scenario import load_scenario

    loaded = load_scenario(scenario, overrides or [], gradients_needed=False)
    text = launch_script(loaded.scenario, scenario, overrides or [], launcher, image=image)
    write_or_print(text, out)


VALIDATED = {"cpu": "demo.toml", "cuda": "validate-gpu.toml"}
"""Sweeps of `gsreal validate`, in the project's scenarios/sweeps, by kind of device."""


@app.command("validate")
def validate_command(
    sweep: Annotated[
        Path | None, typer.Argument(help="Sweep file whose points to run; by default one for this kind of device.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for all results; finished ones are kept.")] = Path(
        "out/validate"
    ),
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Number of devices; default: two cores, all GPUs, or as the sweep says."),
    ] = None,
    only: Only = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Start no run after about this time; the next call resumes.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Calibrate this machine, run the points of a sweep on it, predict them, and compare: tables, charts, a page.

    Calls the factory that each model file names.

    Example: gsreal validate scenarios/sweeps/demo.toml --device cpu --only ddp --out out/validated
    """
    from gsreal.machine import ENVIRONMENT
    from gssim.execution.parent import die_with_parent

    _check_writable(out / "comparison.csv")
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: must be more than 0")
    # ranks are forked: allocators and thread pools read their settings when a process starts. A parent that has used
    # CUDA cannot be forked; NVML tells of GPUs without it.
    needed = {**ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if any(os.environ.get(name) != value for name, value in needed.items()):
        command = [sys.executable, "-m", "gsreal", *sys.argv[1:]]
        process = subprocess.Popen(command, env={**os.environ, **needed}, preexec_fn=die_with_parent)
        try:
            raise typer.Exit(process.wait())
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    from gsreal.validate import Request, default_ranks, device_kind, validate

    kind = device_kind(device)
    file = sweep or Path(__file__).resolve().parents[1] / "scenarios" / "sweeps" / VALIDATED[kind]
    if sweep is None and not file.exists():
        raise UserError("validate: name a sweep: the project's own are in its folder scenarios/sweeps")
    count = _checked_ranks(default_ranks(kind, file) if ranks is None else ranks, kind)
    validate(Request(file, out, kind, count, tuple(only or ()), seconds, trust_code))


SAMPLED = (10, 8, 2)
"""What `gsreal gradients` takes by default: every so many steps, of so many courses and batches."""


@app.command("gradients")
def gradients_command(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario whose model to train; none with --ladder.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Gradient statistics file to write, or family file.")],
    overrides: Overrides = None,
    thresholds: Annotated[
        str | None,
        typer.Option(
            "--thresholds",
            help="Also train with these push thresholds, separated by commas.",
        ),
    ] = None,
    every: Annotated[int, typer.Option("--every", help="Largest number of steps between two sampled ones.")] = SAMPLED[
        0
    ],
    courses: Annotated[
        int, typer.Option("--courses", help="Number of trainings, each with other weights and batches.")
    ] = SAMPLED[1],
    batches: Annotated[
        int, typer.Option("--batches", help="Batches whose gradients are taken at a sampled step.")
    ] = SAMPLED[2],
    ladder: Annotated[
        str | None,
        typer.Option(
            "--ladder",
            help="Train a family of small models instead (bert, gpt, llama, resnet), from which statistics are "
            "transferred to other sizes. Takes minutes; finished trainings are kept beside --out, and skipped.",
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Train the scenario's model for real and write statistics of every rank's gradients.

    On this machine's GPU, if the cluster's devices are GPUs and its memory suffices; else on a core. Calls the factory
    that the model file names.
    """
    from gsreal.data.sources import check_data
    from gsreal.model_files.build import check_factory, set_trust
    from gsreal.statistics.collect import take_statistics, write_statistics
    from gssim.scenario import load_scenario

    set_trust(trust_code)
    _check_positive("--every", every)
    _check_positive("--courses", courses)
    _check_positive("--batches", batches)
    _check_writable(out)
    if ladder is not None:
        if scenario is not None or overrides or thresholds is not None or (every, courses, batches) != SAMPLED:
            raise UserError(
                f"gradients --ladder {ladder}: takes no scenario, --set, --thresholds, --every, --courses or --batches"
            )
        from gsreal.statistics.ladder import take_family, write_family

        write_family(out, take_family(ladder, out.parent / f"{out.stem}.trainings"))
        return
    if scenario is None:
        raise UserError("gradients: name a scenario, or a family with --ladder")
    loaded = load_scenario(scenario, overrides or [], gradients_needed=False)
    check_factory(loaded.scenario.workload.model.module, where=loaded.file)
    check_data(loaded.scenario.workload, where=loaded.file)
    chosen = [] if thresholds is None else _numbers(thresholds, "--thresholds")
    steps = loaded.scenario.run.warmup_steps + loaded.scenario.run.steps
    with activity("gsreal: gradients") as doing:
        doing(f"training {loaded.scenario.name} for {steps} steps, densely and under thresholds")
        statistics = take_statistics(loaded.scenario, chosen, every=every, courses=courses, batches=batches)
    write_statistics(out, statistics)


@app.command("calibrate")
def calibrate_command(
    models: Annotated[list[Path] | None, typer.Argument(help="Model files whose layers to profile.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Cluster file to write.")] = Path("cluster.toml"),
    ranks: Annotated[int | None, typer.Option("--ranks", help="Number of devices to use; default: all.")] = None,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Batch sizes at which layers are profiled.")
    ] = "2,8,16",
    sequence_length: Annotated[int, typer.Option("--sequence-length", help="Sequence length of token models.")] = 128,
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp64.")] = "fp32",
    again: Annotated[
        bool, typer.Option("--again", help="Measure layers again; average with the profiles in --out.")
    ] = False,
    lab: Annotated[
        Path | None,
        typer.Option(
            "--lab", help="Cluster file whose device types, emulated by the lab, are measured and written to --out."
        ),
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", help="Network interface by which several nodes reach each other.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Measure this machine by micro-benchmarks and write a cluster file for predictions.

    Where torchrun or srun starts it on several nodes, it measures each of them and the links between each two, and the
    first node writes the file. Where several ranks have a GPU each, the file is for NCCL, with the topology that `gssim
    cluster --detect` finds. Calls the factories that the model files name.

    Example: gsreal calibrate scenarios/models/gpt-byte-1m.toml --ranks 2 --batch-sizes 4,8,16 --out out/this.toml
    """
    import torch

    from gsreal.calibrate.bench import Settings
    from gsreal.calibrate.cluster_file import (
        averaged,
        cluster_data,
        measure,
        read_previous,
        write_calibrated,
        write_cluster,
    )
    from gsreal.machine import device_name, usable_cores
    from gsreal.model_files.build import DTYPES, set_trust
    from gsreal.run.launch import listening_on
    from gsreal.run.nodes import has_several_nodes, srun_environment

    set_trust(trust_code)
    _check_writable(out)
    if precision not in DTYPES:
        raise UserError(f"--precision {precision}: allowed: {', '.join(DTYPES)}")
    sizes = tuple(sorted(map(int, _numbers(batch_sizes, "--batch-sizes", whole=True))))
    _check_models(sequence_length, models or [])
    names = tuple(map(str, models or []))
    if lab is not None:
        if again or ranks is not None:
            raise UserError("--lab: measures two ranks of each device type, all at once: leave out --again and --ranks")
        _calibrate_lab(lab, Settings(names, sizes, sequence_length, precision, "cpu"), out)
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    available = torch.cuda.device_count() if kind == "cuda" else len(usable_cores())
    count = _checked_ranks(available if ranks is None else ranks, kind)
    settings = Settings(names, sizes, sequence_length, precision, kind, "layers" if again else "")
    os.environ.update(srun_environment(os.environ))
    if "RANK" in os.environ and has_several_nodes():
        if again:
            raise UserError("--again: measures the layers of one node: start it there, without a launcher")
        if interface is not None:
            os.environ.update(listening_on(interface))
        _calibrate_nodes(settings, count, out)
    elif again:
        with _file_lock(out):
            before = read_previous(out, device_name(torch.device(kind)))
            write_cluster(out, averaged(before, measure(settings, ranks=count), where=str(out)))
    else:
        measured = measure(settings, ranks=count)
        write_calibrated(out, [measured], cluster_data(measured, settings), settings)


def _file_lock(file: Path) -> AbstractContextManager[int]:
    """Lock a file that is written more than once, or read before it is written."""
    return locked(file.with_name(f"{file.name}.lock"), place=str(file))


def _check_models(length: int, models: list[Path]) -> None:
    """Raise UserError if one of the models is not trusted, or does not accept sequences of this length."""
    from gsreal.model_files.build import check_factory
    from gssim.scenario import load_model
    from gssim.workload import TokenInput

    _check_positive("--sequence-length", length)
    for path in models:
        model = load_model(path)
        check_factory(model.module, where=str(path))
        source = model.input
        if isinstance(source, TokenInput) and length > source.maximum_sequence_length:
            raise UserError(f"--sequence-length {length}: {path} takes at most {source.maximum_sequence_length}")


def _calibrate_nodes(settings: "Settings", ranks: int, out: Path) -> None:
    """Measure this node and its links; the first process of a node does it, and the first node writes the file."""
    from gsreal.calibrate.cluster_file import write_calibrated
    from gsreal.calibrate.nodes import measure_nodes, nodes_data
    from gsreal.run.nodes import check_addresses

    check_addresses()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    measured = measure_nodes(settings, ranks=ranks)
    if measured is not None:
        write_calibrated(out, measured[0], nodes_data(*measured, settings), settings)


def _calibrate_lab(file: Path, settings: "Settings", out: Path) -> None:
    from gsreal.lab.calibration import calibrate_types, write_types
    from gssim.scenario import load_cluster

    cluster = load_cluster(file)
    with _file_lock(out):
        for types, backend in calibrate_types(cluster, settings, where=str(file)):
            write_types(out, types, backend)  # completed measurements survive an interruption of the rest


def _check_writable(*files: Path | None) -> None:
    """Raise UserError if one of the named files cannot be written, before the work is done."""
    from gssim.execution.files import check_place

    for file in files:
        if file is not None:
            check_place(file)


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option} {value}: must be at least 1")


def _checked_ranks(count: int, kind: str) -> int:
    """Return `count`; raise UserError if this machine is not for so many ranks."""
    from gsreal.machine import usable_cores

    _check_positive("--ranks", count)
    if kind == "cpu" and count > len(usable_cores()):
        raise UserError(f"--ranks {count}: this machine has {len(usable_cores())} cores that may be used")
    if (why := excess("processes", count)) is not None:  # ranks may share a GPU
        raise UserError(f"--ranks: {why}")
    return count


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s < math.inf:
        raise UserError(f"--timeout {timeout_s:g}: must be seconds, more than 0")


def _numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    """Return the distinct numbers of an option, separated by commas: of at least 0, or `whole` ones of at least 1."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    allowed = all(0 <= number < math.inf and not (whole and (number < 1 or number % 1)) for number in numbers)
    if not allowed or len(set(numbers)) < len(numbers):
        kind = "whole numbers of at least 1" if whole else "numbers of at least 0"
        raise UserError(f"{option} {text}: must be distinct {kind}, separated by commas")
    return numbers


OTHER_PRECISIONS = ("bf16",)
"""Precisions in which a new model is traced besides fp32."""


@app.command("trace")
def trace_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Dotted path to a factory, a Hugging Face config.json, hf:MODEL_TYPE, or a model file to trace again."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Model file to write.")],
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--argument", metavar="NAME=VALUE", help="Argument of the factory, or key of the config; repeatable."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model; default: the file's.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", help="The input is token ids; size of the vocabulary.")
    ] = None,
    maximum_sequence_length: Annotated[
        int | None, typer.Option("--maximum-sequence-length", help="Default: the config.json's, or 256.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="For tokens: next-token, masked-token or sequence-classification. Default: the config.json's, or "
            "next-token.",
        ),
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="The input is images, such as 1x8x8.")] = None,
    classes: Annotated[
        int | None, typer.Option("--classes", help="Number of classes; default: 10 of images, 2 of sequences.")
    ] = None,
    padding: Annotated[
        int | None, typer.Option("--padding", help="Padding token of sequences; default: the config's, or 0.")
    ] = None,
    auto_class: Annotated[
        str | None, typer.Option("--auto-class", help="With hf:, the Auto class; default: the task's.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Trace only at this length, not as a function of it.")
    ] = None,
    precisions: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            help="Precision of the trace: fp32, bf16, fp16 or fp64; repeatable, the first is that of scaled bytes. "
            "Default: a model file's, or fp32 and bf16.",
        ),
    ] = None,
    source: Annotated[str | None, typer.Option("--source", help="Where the model's numbers are published.")] = None,
    autocast: Annotated[
        list[str] | None,
        typer.Option("--autocast", help="Also trace under torch.autocast in bf16 or fp16; repeatable."),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapters", help="Also trace with adapters at query-value, all-linear, or q_proj,...; repeatable."
        ),
    ] = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Also with some layers frozen (workload.frozen), divided among ranks too.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Trace blocks as torch.compile (inductor) runs them.")
    ] = False,
    recompute: Annotated[
        str,
        typer.Option("--recompute", help="Recomputation inside the graphs of compiled blocks (see plan.recompute)."),
    ] = "none",
    trust_code: TrustCode = False,
) -> None:
    """Trace any nn.Module or Hugging Face config into a model file: no weights, no GPU.

    Calls the factory that is named, or that the model file names: only for the latter must it be trusted.

    Example: gsreal trace config.json --precision bf16 --out out/mine.toml
    """
    from gsreal.model_files.build import set_trust
    from gsreal.model_files.request import Request

    is_model_file = model.endswith(".toml")
    set_trust(trust_code or not is_model_file)
    _check_writable(out)
    request = Request(
        model=model,
        arguments=tuple(arguments or ()),
        name=name or out.stem,
        vocabulary=vocabulary,
        maximum_sequence_length=maximum_sequence_length,
        task=task,
        image=image,
        classes=classes,
        padding=padding or 0,
        states_padding=padding is not None,
        auto_class=auto_class,
        sequence_length=sequence_length,
        precision=precisions[0] if precisions else None,
        other_precisions=tuple(precisions[1:]) if precisions else () if is_model_file or compiled else OTHER_PRECISIONS,
        only_where_possible=not precisions,
        source=source,
        autocast=tuple(autocast or ()),
        adapters=tuple(adapters or ()),
        frozen=frozen,
        compiled=compiled,
        recompute=recompute,
    )
    _trace(request, out)


def _trace(request: "Request", out: Path) -> None:
    """Write the traced model file; print what was traced on stderr."""
    from gsreal.model_files.config_file import unused_keys
    from gsreal.model_files.request import check_options, traced_model
    from gsreal.model_files.trace import counted_table, write_model

    check_options(request)
    model = request.model
    if model.endswith(".json") and (unused := unused_keys(Path(model))):
        print(
            f"gsreal: {model}: probably without effect, as the architecture's config in transformers does not declare "
            f"them: {', '.join(unused)}",
            file=sys.stderr,
        )
    tables: list[str] = []
    notes: list[str] = []
    with activity("gsreal: trace") as doing:
        doing(f"tracing {model}")
        traced = traced_model(
            request, on_counted=lambda counted: tables.append(counted_table(counted)), on_note=notes.append
        )
    write_model(out, traced)
    for note in notes:
        print(f"gsreal: {note}", file=sys.stderr)
    print(*tables, sep="\n", file=sys.stderr)
    print(f"gsreal: {out}: {traced.elements:,} parameters in {len(traced.layers)} kinds of layer", file=sys.stderr)


def main() -> None:
    """Run the command line; a user error is one line and exit code 2, a failed run one line and exit code 1."""
    with unwinding(), _torch_caches():
        run_command_line(app, "gsreal", interrupted="all ranks are stopped")


@contextmanager
def _torch_caches() -> Iterator[None]:
    """Give torch, which creates a folder for compiled kernels when imported, one that is removed with this process."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    with scratch_folder("gsreal-run-") as folder:
        os.environ[name] = str(folder / SCRATCH_KERNELS)
        try:
            yield
        finally:
            del os.environ[name]
