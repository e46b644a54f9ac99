"""Commands on plans, clusters and models of other programs: import, export, cluster, fits, models."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gssim import interop
from gssim.cli.commands import app
from gssim.cluster import presets
from gssim.errors import UserError, one_line
from gssim.execution.cache import Shared
from gssim.execution.files import write_text
from gssim.interop.formats import FORMATS, PROGRAMS
from gssim.planner import with_suggested_changes
from gssim.result import Result
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import PIPE_WIDTH, Overrides, ScenarioFile, activity, folding, plain_console, write_or_print
from gssim.units import counted, human_bytes
from gssim.workload import shipped_models


def _say(command: str, kind: str, line: str) -> None:
    print(one_line(f"gssim: {command}: {kind}: {line}"), file=sys.stderr)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="The file; `-` reads a script or arguments from stdin.")],
    model: Annotated[
        str, typer.Option("--model", help="Model file, Hugging Face config.json or id, or a shipped name.")
    ],
    cluster: Annotated[Path, typer.Option("--cluster", help="Cluster file.")],
    overrides: Overrides = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; by default detected.")
    ] = None,
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="KEY", help="Leave out a refused key; * and ? are wildcards; repeatable."),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--variable",
            metavar="NAME=VALUE",
            help="Value of a script's variable, or 1=VALUE of its first argument; repeatable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Scenario file to write; by default it is printed.")] = None,
) -> None:
    """Make a scenario of a DeepSpeed, Accelerate, Megatron-LM, torchtitan, Automodel or axolotl file, or of arguments
    of Hugging Face's Trainer (LLaMA-Factory, TRL).

    Keys without an effect and defaults are listed on stderr. A key that changes the answer and cannot be simulated is
    refused, and nothing is written; --set gives what it would have said, --ignore leaves it out.

    Example: gssim import scenarios/imports/deepspeed.json --model llama3-8b --cluster scenarios/clusters/dgx-h100.toml
    """
    text = interop.standard_input() if str(file) == "-" else None
    try:
        imported = interop.import_scenario(
            Path("arguments") if text is not None else file,
            model=model,
            cluster=cluster,
            overrides=overrides or [],
            form=form,
            ignored=ignored or [],
            out=out,
            text=text,
            variables=variables or [],
        )
    except interop.RefusedError as error:
        for line in error.refused[1:] and error.refused:  # the error itself names a single one
            _say("import", "refused", line)
        raise
    for reason, lines in imported.reasons:
        why = reason.removeprefix("approximated: ")
        _say("import", "without effect" if why == reason else "approximated", f"{', '.join(lines)}: {why}")
    for line in imported.defaults:
        _say("import", "default", line)
    write_or_print(imported.text, out)


@app.command("export")
def export_command(
    scenario: ScenarioFile,
    to: Annotated[str, typer.Option("--to", metavar="PROGRAM", help=f"{', '.join(PROGRAMS)}.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; by default it is printed.")] = None,
) -> None:
    """Write a scenario's plan as a configuration of another program, or as a script for torchrun.

    A plan that the program cannot execute is refused; what its format cannot hold is listed on stderr.

    Example: gssim export scenarios/llama3-8b-fsdp.toml --to torchtitan
    """
    loaded = load_scenario(scenario, overrides or [], gradients_needed=False)
    try:
        exported = interop.export_scenario(loaded.scenario, to)
    except UserError as error:
        raise UserError(f"{scenario}: {error}") from None
    for note in exported.notes:
        _say("export", "not in the file", note)
    write_or_print(exported.text, out)


@app.command("cluster")
def cluster_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="NCCL's XML or `nvidia-smi topo -m` of hosts; and Slurm's topology.conf or topology.yaml, topograph's "
            "output, or nodes of Kubernetes, which join them."
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="GPU of the hosts, such as h100 or a preset's name; repeated: one for each host's file."
        ),
    ] = None,
    nic: Annotated[
        list[str] | None,
        typer.Option(
            "--nic",
            help="Network cards, a preset of links such as roce-100 or tcp-25g; repeated: one for each host's file.",
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option("--hosts", help="Number of equal hosts, without a switch file.")] = None,
    nic_counts: Annotated[
        list[int] | None,
        typer.Option(
            "--nics",
            help="Number of network cards of a host; default: the file's, or the usual server's. Repeated: one for "
            "each host's file.",
        ),
    ] = None,
    devices: Annotated[
        list[int] | None,
        typer.Option(
            "--devices",
            help="Number of a host's devices to use, the first ones; default: all. Repeated: one for each host's file.",
        ),
    ] = None,
    detect: Annotated[bool, typer.Option("--detect", help="Describe this machine.")] = False,
    oversubscription: Annotated[
        float, typer.Option("--oversubscription", help="Bandwidth below each switch over that above it.")
    ] = 1.0,
    nccl_tests: Annotated[
        Path | None,
        typer.Option(
            "--nccl-tests", help="Log of nccl-tests' all_reduce_perf, or a CSV file: NCCL's constants are fitted to it."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Cluster file to write; by default it is printed.")] = None,
) -> None:
    """Make a cluster file from what machines, schedulers and libraries write about hosts and switches.

    What was assumed is listed on stderr, and in the file. The last line is the command that draws the cluster.

    Example: gssim cluster --gpu a100 --hosts 4 --out out/four.toml
    """
    if not (files or gpu or detect):
        raise UserError("Missing argument 'files', or --gpu, or --detect (see `gssim cluster --help`)")
    name = out.stem if out is not None else ""
    made = interop.cluster_of(
        files or [],
        gpus=gpu or [],
        nics=nic or [],
        nic_counts=nic_counts or [],
        hosts=hosts,
        devices=devices or [],
        detect=detect,
        oversubscription=oversubscription,
        name=name,
        nccl_tests=nccl_tests,
    )
    for note in made.notes:
        _say("cluster", "default", note)
    for note in made.fitted:
        _say("cluster", "fitted", note)
    if out is not None:
        write_text(out, made.text)
        drawn = shlex.join(["python", "-m", "analysis", "draw", str(out), "--out", str(out.with_suffix(".png"))])
        print(one_line(drawn))
    else:
        sys.stdout.write(made.text + "# python -m analysis draw FILE --out FILE.png\n")


DOES_NOT_FIT = 3
"""Exit code of `gssim fits` for a plan that does not fit."""


@app.command("fits")
def fits_command(
    model: Annotated[str, typer.Argument(help="Model file, Hugging Face config.json or id, or a shipped name.")],
    gpu: Annotated[str, typer.Option("--gpu", help="GPU, such as h100, or a preset's name.")],
    count: Annotated[int, typer.Option("--count", help="Number of GPUs, in their usual servers.")] = 1,
    method: Annotated[
        str | None, typer.Option("--plan", help="Method, such as ddp; default: single on one GPU, else zero3.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Result as JSON instead.")] = False,
) -> None:
    """Say in one line whether a training fits, by how much, and what to change; exit 0 if it does, 3 if not.

    Assumes one sample of the model's longest sequence on each data-parallel rank, 16 bits (--set: fp32), and AdamW.

    Example: gssim fits llama3-8b --gpu h100 --count 8 --plan zero3 --set workload.global_batch_size=16
    """
    given = {"plan.method": method or ("single" if count == 1 else "zero3")}
    with activity("gssim: fits") as doing:
        model_file = interop.find_model(model)
        cluster = interop.usual_cluster(gpu, count)
        device = next(iter(cluster["device_types"]))
        rates = presets("devices")[device]["peak_flop_per_s"]
        longest = getattr(model_file.model.input, "maximum_sequence_length", None)
        workload: dict[str, Any] = {
            "model": str(model_file.path.resolve()),
            "precision": next(each for each in ("bf16", "fp16", "fp32") if each in rates),
            "global_batch_size": count,
        }
        if longest is not None:
            workload["sequence_length"] = longest
        name = f"{model_file.model.name} on {count} x {device}"
        tables = {"name": name, "cluster": cluster, "workload": workload, "plan": {"method": given["plan.method"]}}
        asked = overrides or []
        batch = [] if any(each.startswith("workload.global_batch_size") for each in asked) else [0]
        loaded = load_scenario(Path("fits"), asked, tables=tables)
        if batch:
            plan = loaded.scenario
            samples = plan.policies.data_ranks * plan.plan.micro_batches
            loaded = load_scenario(Path("fits"), [*asked, f"workload.global_batch_size={samples}"], tables=tables)
        doing(f"adding up the memory of {loaded.scenario.ranks:,} ranks")
        shared = Shared()
        result = with_suggested_changes(loaded, simulate(loaded, shared=shared).result, shared=shared)
    scenario = loaded.scenario
    length = f" of {scenario.workload.sequence_length} tokens" if scenario.workload.sequence_length else ""
    trained = f"{scenario.workload.precision}, {scenario.workload.optimizer}"
    under = f"{scenario.plan.method} ({trained}, {counted(scenario.workload.global_batch_size, 'sample')}{length})"
    print(result.to_json() if as_json else one_line(f"{scenario.name} under {under}: {_fit(result)}"))
    if result.does_not_fit is not None:
        raise typer.Exit(DOES_NOT_FIT)


def _fit(result: Result) -> str:
    """Return whether a plan fits and by how much; if it does not fit, also the change that helps most."""
    if result.does_not_fit is None:
        if result.margin is None:
            return "fits"
        spare, memory = human_bytes(result.margin.margin_bytes), human_bytes(result.margin.memory_bytes)
        return f"fits, {spare} of {memory} to spare (largest: {result.margin.category})"
    lack = f"does not fit, {human_bytes(result.does_not_fit.excess_bytes)} too much"
    lack += " for a host's memory" if result.does_not_fit.memory == "host" else ""
    lack += f" (largest: {result.does_not_fit.category})"
    best = next((each for each in result.remedies if each.fits), None) or next(iter(result.remedies), None)
    if best is None:
        return f"{lack}; no change of the plan helps: take more GPUs or a smaller model"
    margin = best.margin.margin_bytes
    then = f"{human_bytes(margin)} to spare" if best.fits else f"still {human_bytes(-margin)} too much"
    return f"{lack}; with {best.change}: {then}"


@app.command("models")
def models_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of models as JSON.")] = False,
) -> None:
    """List the models that come with the package: parameters, longest sequence, origin."""
    models = {name: interop.find_model(name).model for name in shipped_models()}
    rows = [
        {
            "name": name,
            "parameters": model.elements,
            "maximum_sequence_length": getattr(model.input, "maximum_sequence_length", None),
            "source": model.source,
        }
        for name, model in models.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = plain_console(PIPE_WIDTH)
    heads = ("model", "parameters", "longest sequence")
    cells = [(str(row["name"]), f"{row['parameters']:,}", str(row["maximum_sequence_length"] or "")) for row in rows]
    used = sum(max(map(len, column)) + 3 for column in zip(heads, *cells, strict=True))
    room = console.width - used - 4
    table = folding((*heads, "origin") if room >= LEAST_ORIGIN else heads)
    for row, texts in zip(rows, cells, strict=True):
        origin = str(row["source"]).partition(";")[0]  # --json has all of it
        shown = origin if len(origin) <= room else f"{origin[: room - 3]}..."
        table.add_row(*texts, *([shown] if room >= LEAST_ORIGIN else []))
    console.print(table)


LEAST_ORIGIN = 20
"""Least room, in letters, in which a model's origin is shown."""
