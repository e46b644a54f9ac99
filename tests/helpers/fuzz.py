# ruff: noqa: E501  a command line or a value and what it is for are one line
"""Runs command lines on mutated inputs, each in a process of its own with limits of memory and processor time.

    python tests/helpers/fuzz.py FOLDER --first 0 --cases 500 --programs gssim,analysis

One process imports the programs, and forks a child for each case, which mutates its copy of the inputs, limits itself,
and runs the command line. A failure is printed with its case's number, its command line and what was said; its folder
is kept.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OPENBLAS_NUM_THREADS="1", POLARS_MAX_THREADS="1", OMP_NUM_THREADS="1", COLUMNS="140")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fuzz_mutations as mutations

MEMORY_BYTES = 2 * 2**30
PROCESSOR_S = 20
PATIENCE_S = 400
"""Wall-clock limit, on a machine that others use too."""
LONGEST_LINE = 300
SLOWEST_S = 1e30
REFUSED, ANSWERED, FAILED = "refused", "answered", "failed"


@dataclass(frozen=True)
class Template:
    """A command line that works, and the files that it reads."""

    program: str
    words: tuple[str, ...]
    files: tuple[str, ...]
    """Files of the corpus; folders end in `/`."""
    needed: tuple[str, ...] = ()
    """Files that are copied too, and not mutated as often."""


SCENARIO = ("scenario.toml", "pair.toml", "tiny.toml", "tiny.json")
IMPORTS = {
    "deepspeed.json": "gpt2-124m",
    "accelerate.yaml": "llama3-8b --set workload.global_batch_size=8",
    "megatron.sh": "gpt3-1.3b",
    **dict.fromkeys(("torchtitan.toml", "automodel.yaml", "axolotl.yaml", "trainer.yaml"), "llama3-8b"),
}
"""Other programs' files, and what they need beside."""
FABRICS = ("dgx-h100.xml", "smi.txt", "topology.conf", "topology.yaml", "nodes.json")
PARTED = (*SCENARIO, "devices.toml", "backend.toml", "parted.toml")


def _templates() -> tuple[Template, ...]:
    def of(program: str, line: str, *files: str, needed: tuple[str, ...] = ()) -> Template:
        return Template(program, tuple(line.split()), files, needed)

    real = "--set workload.model=gpt.toml"  # whose module there is
    clusters = ("ring.toml", "full.toml", "torus.toml", "servers.toml", "spines.toml", "sites.toml")
    runs = [
        of("gssim", f"run scenario.toml --json{more}", *SCENARIO) for more in ("", " --trace t.json", " --out results")
    ]
    runs += [of("gssim", "run scenario.toml", *SCENARIO), of("gssim", "run gs.toml", "gs.toml", *SCENARIO[1:])]
    runs += [of("gssim", "run gs.toml --json", "gs.toml", *SCENARIO[1:])]
    runs += [
        of("gssim", f"run scenario.toml --json --set cluster={name} --set plan.method={method}", name, needed=SCENARIO)
        for name, method in zip(clusters, ("zero3", "ddp", "gs", "zero2", "gs_z3", "zero1"), strict=True)
    ]
    return (
        *runs,
        of("gssim", "run scenario.toml --set cluster=parted.toml --json", "devices.toml", "backend.toml", "parted.toml", needed=SCENARIO),
        of("gssim", "check scenario.toml gs.toml", "gs.toml", *SCENARIO),
        of("gssim", "sweep sweep.toml --json --jobs 1", "sweep.toml", *SCENARIO),
        of("gssim", "sweep sweep.toml --out results --jobs 1", "sweep.toml", "results/", needed=SCENARIO),
        of("gssim", "sweep sweep.toml --out table.parquet --jobs 1", "sweep.toml", "table.parquet", "table.csv", needed=SCENARIO),
        of("gssim", "sweep sweep.toml --out table.csv --jobs 1", "table.parquet.parts/", needed=(*SCENARIO, "sweep.toml")),
        of("gssim", "search scenario.toml --jobs 1 --json --set search.methods=[\"ddp\",\"gs\"]", *SCENARIO),
        of("gssim", "search scenario.toml --jobs 1 --study convergence.csv --most-loss-change 0.1 --set search.methods=[\"gs\"]",
           "convergence.csv", needed=SCENARIO),
        *(
            of("gssim", f"import {name} --model {model} --cluster eight.toml{more}", name, needed=("eight.toml",))
            for name, model in IMPORTS.items()
            for more in ("", " --out made.toml")
        ),
        *(of("gssim", f"cluster {name} --gpu h100 --out made.toml", name) for name in FABRICS),
        of("gssim", "cluster dgx-h100.xml topology.conf", "dgx-h100.xml", "topology.conf"),
        of("gssim", "cluster smi.txt topology.yaml --gpu h100 --oversubscription 2", "smi.txt", "topology.yaml"),
        of("gssim", "cluster --gpu a100 --hosts 2 --nccl-tests nccl.log", "nccl.log"),
        of("gssim", "fits gpt2-124m --gpu h100 --count 2", *(), needed=()),
        of("gssim", "fits tiny.toml --gpu a100 --set workload.global_batch_size=8 --json", "tiny.toml"),
        of("gssim", "export scenario.toml --to deepspeed", *SCENARIO),
        of("gssim", "export scenario.toml --to torchrun --out train.py", *SCENARIO),
        of("gssim", "program scenario.toml --rank 0", *SCENARIO),
        of("gssim", "support scenario.toml", *SCENARIO),
        of("gssim", "models --json"),
        of("analysis", "ingest rank0.json rank1.json --scenario scenario.toml --set cluster.backend=nccl --out measured.json --trace step.json", "rank0.json", "rank1.json", needed=SCENARIO),
        of("analysis", "compare results --out out", "results/"),
        of("analysis", "report results --out page.html", "results/"),
        of("analysis", "report table --out page.html", "table/"),
        of("analysis", "report comparison --out page.html", "comparison/"),
        of("analysis", "report study --out page.html", "study/"),
        of("analysis", "timeline traces/predicted.json traces/measured.json --out t.png", "traces/"),
        of("analysis", "sweep table.parquet --out charts", "table.parquet"),
        of("analysis", "sweep table.csv --out charts", "table.csv"),
        *(of("analysis", f"draw {name} --out d.svg", name) for name in (*clusters, "pair.toml")),
        of("analysis", "convergence study.toml --out kept", "study.toml", needed=SCENARIO),
        of("analysis", "literature published.csv --jobs 1 --json", "published.csv"),
        of("analysis", "keys", "scenario.toml"),
        of("gsreal", f"run scenario.toml {real}", *SCENARIO, "gpt.toml"),
        of("gsreal", f"run scenario.toml --checkpoint kept {real}", "kept/", needed=(*SCENARIO, "gpt.toml")),
        of("gsreal", f"gradients scenario.toml --out g.json {real}", *SCENARIO, "gpt.toml"),
        of("gsreal", f"lab scenario.toml --set cluster=ring.toml {real}", "ring.toml", needed=(*SCENARIO, "gpt.toml")),
        *(of("gsreal", f"script scenario.toml --for {name} {real}", *SCENARIO, "gpt.toml") for name in ("slurm", "torchrun", "kubernetes", "skypilot")),
        of("gsreal", "validate sweep.toml --out kept --ranks 2 --seconds 1", "sweep.toml", needed=(*SCENARIO, "gpt.toml")),
        of("gsreal", "lab --sweep sweep.toml --out results", "sweep.toml", "results/", needed=SCENARIO),
        of("gsreal", "calibrate gpt.toml --out c.toml --sequence-length 16 --ranks 1", "gpt.toml"),
        of("gsreal", "trace gsreal.models.gpt --argument width=8 --argument heads=2 --argument layers=1 --vocabulary 16"
           " --maximum-sequence-length 16 --out m.toml"),
        of("gsreal", "trace gpt.toml --out m.toml", "gpt.toml"),
    )  # fmt: skip


# One case ------------------------------------------------------------------------------------------------------------


def prepared(number: int, folder: Path, corpus: Path, programs: tuple[str, ...]) -> tuple[Template, list[str]]:
    """Lay out a case's files in its folder; return its template and command line."""
    draw = random.Random(number)
    template = draw.choice([each for each in _templates() if each.program in programs])
    for name in dict.fromkeys((*template.files, *template.needed)):
        if name.endswith("/"):
            shutil.copytree(corpus / name, folder / name)
        else:
            shutil.copyfile(corpus / name, folder / name)
    words = list(template.words)
    options = _options(template)
    if options and draw.random() < 0.25:
        (folder / "binary").write_bytes(bytes(range(256)))
        (folder / "empty").touch()
        return template, mutations.mutate_option(draw, words, options, list(template.files))
    if not template.files or draw.random() < 0.3:
        words = mutations.mutate_words(draw, words)
    if template.files and (words == list(template.words) or draw.random() < 0.3):
        chosen = draw.choice(template.files)
        inside = sorted(each for each in (folder / chosen).rglob("*") if each.is_file()) if chosen.endswith("/") else []
        mutations.mutate_file(draw, draw.choice(inside) if inside else folder / chosen)
    return template, words


def run_case(number: int, folder: Path, corpus: Path, programs: tuple[str, ...]) -> None:
    """Run a case in this process, which ends with it."""
    folder.mkdir()
    sys.setrecursionlimit(50_000)  # of what is nested deeper than the programs may read
    template, words = prepared(number, folder, corpus, programs)
    sys.setrecursionlimit(1000)
    (folder / "case.json").write_text(json.dumps([number, template.program, words]))
    os.chdir(folder)
    for stream, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    used = (
        0 if template.program != "gsreal" else _address_space_bytes()
    )  # torch alone reserves more than all else takes
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    spent = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + PROCESSOR_S, spent + PROCESSOR_S + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [template.program, *words]
    code = 1
    try:
        _main(template.program)()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _options(template: Template) -> dict[str, type]:
    """Return the types of the values of a command's options, by name."""
    app = sys.modules[_main(template.program).__module__].app
    (command,) = (
        each for each in app.registered_commands if (each.name or each.callback.__name__) == template.words[0]
    )
    found: dict[str, type] = {}
    for name, parameter in inspect.signature(command.callback).parameters.items():
        annotation, *more = typing.get_args(parameter.annotation) or (parameter.annotation,)
        info = next((each for each in more if type(each).__name__ == "OptionInfo"), None)
        if info is not None:
            named = (each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("--"))
            option = next(named, f"--{name.replace('_', '-')}")
            kinds = {annotation, *typing.get_args(annotation)} & {bool, int, float, Path}
            found[option] = kinds.pop() if kinds else str
    return {name: kind for name, kind in found.items() if name not in LASTING}


LASTING = ("--no-limits", "--detect", "--dask", "--interface")
"""Options without which a case has no bound, or that look at the machine."""


def _main(program: str) -> Any:
    if program == "gssim":
        from gssim.cli import main
    elif program == "analysis":
        from analysis.cli import main
    else:
        from gsreal.cli import main
    return main


class _WouldRun(SystemExit):
    """Ends a case that would start ranks, or measure this machine: nothing has refused it before."""


def _no_ranks() -> None:
    """Let no case start ranks or measure: only what is refused before that is tested."""
    import gsreal.calibrate.bench
    import gsreal.calibrate.cluster_file
    import gsreal.cli
    import gsreal.lab.building
    import gsreal.lab.lab
    import gsreal.run.launch
    import gsreal.statistics.collect
    import gsreal.validate
    from gsreal.machine import ENVIRONMENT

    # without it `validate` starts a process of its own, in which nothing is stopped
    os.environ.update(ENVIRONMENT, PYTORCH_NVML_BASED_CUDA_CHECK="1")

    def stop(*_: object, **__: object) -> Any:
        raise _WouldRun(0)

    for module, name in (
        (gsreal.run.launch, "launch"),
        (gsreal.cli, "launch"),
        (gsreal.lab.lab, "run_lab"),
        (gsreal.statistics.collect, "take_statistics"),
        (gsreal.calibrate.cluster_file, "measure"),
        (gsreal.validate, "validate"),
    ):
        if hasattr(module, name):
            setattr(module, name, stop)
    gsreal.lab.building.check_tools = lambda: None


# Judgement -----------------------------------------------------------------------------------------------------------

NO_NUMBER = re.compile(r"(?<![\w./\"'-])[+-]?(?:nan|inf)(?![\w./\"'-])", re.IGNORECASE)
NOTES = "refused|default|approximated|without effect|fitted|not in the file"
NOTE = re.compile(rf"^gssim: (?:import|export|cluster): (?:{NOTES}): ")
"""Lines on assumed, ignored or refused keys, before the line with the error."""
PROGRESS = re.compile(
    rf"^(?:gssim: (?:import|export|cluster): (?:{NOTES}): |predicting|searching|analysis: (?:takes|trains)|gsreal: \S+: \d|\w+: run: \w+ing )\b.*$"
)


def judged(code: int, folder: Path) -> tuple[str, str]:
    """Return whether a case was refused, answered or failed, and why."""
    _, program, words = json.loads((folder / "case.json").read_text())
    out = (folder / "stdout.txt").read_text(encoding="utf-8", errors="replace")
    err = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
    said = [line for line in err.splitlines() if line.strip() and not PROGRESS.match(line)]
    if code < 0:
        return FAILED, f"killed by {signal.Signals(-code).name}"
    if "Traceback" in err:
        return FAILED, "traceback"
    if code == 2:
        ours = [line for line in said if line.startswith(f"{program}: ")]
        if "Usage:" in out + err:
            return REFUSED, ""
        while len(said) > 1 and NOTE.match(said[0]):
            del said[0]
        if len(said) != 1 or not ours:
            return FAILED, f"{len(said)} lines"
        if len(said[0]) > LONGEST_LINE + _length_of_paths(said[0], words, folder):
            return FAILED, f"a line of {len(said[0])} characters"
        if any(not c.isprintable() for c in said[0]):
            return FAILED, "control characters on the console"
        return REFUSED, ""
    if code != 0 and (code, words[:1]) != (3, ["fits"]):  # where it does not fit
        return FAILED, f"exit {code}"
    return _plausible(_without_questions(out, folder), words)


def _length_of_paths(line: str, words: list[str], folder: Path) -> int:
    """Return the length of existing paths that a line repeats from the command line: they are not shortened."""
    paths = {part for word in words for part in (word, word.partition("=")[2]) if os.sep in part}
    return sum(len(path) * line.count(path) for path in paths if os.path.exists(folder / path))


def _without_questions(out: str, folder: Path) -> str:
    """Return what was printed without the files' own first comments, which are shown as their question."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("*.toml") if file.is_file()]
    questions = {text.partition("\n")[0].lstrip("# ").strip() for text in texts if text.startswith("#")}
    return "\n".join(line for line in out.splitlines() if line.strip() not in questions)


def _plausible(out: str, words: list[str]) -> tuple[str, str]:
    if "\x1b" in out or "\x07" in out:
        return FAILED, "control characters on the console"
    if words[:1] == ["import"]:
        out = re.sub(r"#.*", "", out)  # repeats keys without effect, with their values
    if "--json" in words and "--help" not in words and out.strip():

        def refuse(text: str) -> float:
            raise ValueError(text)

        try:
            data = json.loads(out, parse_constant=refuse)
        except ValueError as error:
            return FAILED, f"no finite JSON: {error}"
        for result in data if isinstance(data, list) else [data]:
            if isinstance(result, dict) and "step_time_s" in result and (why := _result_fault(result)):
                return FAILED, why
    elif words[:1] != ["keys"] and NO_NUMBER.search(out):
        return FAILED, f"no number: {NO_NUMBER.search(out)}"
    return ANSWERED, ""


def _result_fault(result: dict[str, Any]) -> str | None:
    """Return what of a Result cannot be true."""
    step_s = result["step_time_s"]
    if not 0 < step_s < SLOWEST_S or not 0 < result["throughput_samples_per_s"] < SLOWEST_S:
        return f"step_time_s = {step_s}, throughput {result['throughput_samples_per_s']}"
    if not math.isclose(sum(result["phases_s"].values()), step_s, rel_tol=1e-6):
        return f"phases {result['phases_s']} of {step_s}"
    if any(
        each["peak_allocated_bytes"] < 0 or any(v < 0 for v in each["peak_by_category_bytes"].values())
        for each in result["ranks"]
    ):
        return "negative bytes"
    if any(value < 0 for value in result["phases_s"].values()):
        return "negative phases"
    return None


# All cases -----------------------------------------------------------------------------------------------------------


def forked(function: Any, *arguments: Any) -> int:
    """Run a function in a child that ends with it; return the child's process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def fuzz(folder: Path, first: int, cases: int, programs: tuple[str, ...], jobs: int) -> dict[str, Any]:
    """Run cases; return counts, and what failed."""
    corpus = folder / "corpus"
    if not corpus.exists():
        import fuzz_corpus

        child = forked(fuzz_corpus.build, corpus, programs)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the corpus cannot be made"
    _warm(programs)
    counts = {REFUSED: 0, ANSWERED: 0, FAILED: 0}
    failures: list[dict[str, Any]] = []
    waiting, under_way = list(range(first, first + cases))[::-1], {}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            number = waiting.pop()
            place = folder / f"case-{number}"
            shutil.rmtree(place, ignore_errors=True)
            under_way[forked(run_case, number, place, corpus, programs)] = (number, place, time.monotonic())
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            for each, (_, _, began_s) in under_way.items():
                if time.monotonic() - began_s > PATIENCE_S:
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.003)
            continue
        if child not in under_way:
            continue
        number, place, began_s = under_way.pop(child)
        outcome, why = judged(os.waitstatus_to_exitcode(status), place)
        counts[outcome] += 1
        if outcome == FAILED:
            _, program, words = json.loads((place / "case.json").read_text())
            said = (place / "stderr.txt").read_text(errors="replace")[-1500:]
            failures.append({"case": number, "program": program, "words": words, "why": why, "said": said})
            print(json.dumps(failures[-1]), flush=True)
        else:
            shutil.rmtree(place)
    return {"cases": cases, **counts, "failures": failures}


def _warm(programs: tuple[str, ...]) -> None:
    """Import what all cases need; nothing that starts threads is called."""

    import gssim.cli.commands
    import gssim.planner.advice  # noqa: F401

    if "analysis" in programs:
        import matplotlib.pyplot  # noqa: F401
        import polars  # noqa: F401

    if "gsreal" in programs:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401

        _no_ranks()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--programs", default="gssim,analysis")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = fuzz(asked.folder.resolve(), asked.first, asked.cases, tuple(asked.programs.split(",")), asked.jobs)
    print(f"cases {found['cases']}: {found[ANSWERED]} answered, {found[REFUSED]} refused, {found[FAILED]} failed")
    raise SystemExit(bool(found["failures"]))


if __name__ == "__main__":
    main()
