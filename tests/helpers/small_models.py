"""Model files of tests: small models, traced as `gsreal trace` does.

As a command, traces the files that it is given, or else all of tests, again; shipped ones too: see CONTRIBUTING.md.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from gsreal.model_files import request as tracing
from gsreal.model_files import trace
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.trace import write_model
from gssim.execution.files import write_text
from gssim.scenario import load_model
from gssim.workload import Model

KEPT = Path(__file__).resolve().parent / "models" / "of_tests"
"""Model files that real tests run."""
MODELS_OF_TESTS = sorted(KEPT.parent.rglob("*.toml"))
"""All model files of tests; a slow test traces them again, and this module run as a command writes them anew."""
SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "models"
"""Folder of the model files that ship."""


@contextmanager
def whole_layers_alone(*, sliced: bool = False, split: bool = True, precisions: bool = True) -> Iterator[None]:
    """Trace layers whole (and, if `sliced`, under tensor parallelism) alone, in a third of the time.

    What divides sequences, contexts and experts is left out, and what ranks do that train only some layers; and, unless
    `split`, a quarter of the rest: the costs of a split backward, which no other quantity of a layer depends on. Unless
    `precisions`, layers are traced in the model's own precision alone, and not in others of its file.
    """
    left_out = [name for name in trace.DIVIDED_STEPS if not (sliced and name == "sliced_layers")]
    nothing = dict.fromkeys(left_out, lambda *_given: None)
    patches = [
        patch.dict(trace.DIVIDED_STEPS, nothing),
        patch.object(trace, "with_partial_costs", lambda _model, layers, *_given, **_where: layers),
    ]
    if not split:
        patches.append(patch.object(trace, "with_split_costs", lambda _model, layers, *_given, **_where: layers))
    if not precisions:
        patches.append(patch.object(tracing, "_trace_other_precisions", lambda *_given: []))
    with ExitStack() as active:
        for each in patches:
            active.enter_context(each)
        yield


def kept(request: Request) -> Path:
    """Return the kept model file of a request, named after it.

    It is traced and kept where there is none yet, or one of another request (which its first line holds).
    """
    path, first = KEPT / f"{request.name}.toml", f"# {request}\n"
    if not path.exists() or not path.read_text(encoding="utf-8").startswith(first):
        KEPT.mkdir(exist_ok=True)
        _write(path, _traced_on_cpus(request), first)
    return path


def traced_again(file: Path) -> Model:
    """Return the model of a file as it is traced today, with all that the file holds.

    Ways in which ranks divide layers that a file of tests lacks, as no test needs them, are left out, and so is what
    GPUs run otherwise. The reason that such a file without sliced layers states stays. Shipped files get all.
    """
    known = load_model(file)
    lengths = known.traced_sequence_lengths
    alone = lengths[0] if len(lengths) == 1 else None
    if file.resolve().parent == SHIPPED:
        return traced_model(Request(model=str(file), arguments=(), name=file.stem, sequence_length=alone))
    lacks = [name for name in trace.DIVIDED_STEPS if not getattr(known, name)]
    with patch.dict(trace.DIVIDED_STEPS, dict.fromkeys(lacks, lambda *_given: None)):
        again = _traced_on_cpus(Request(model=str(file), arguments=(), name=file.stem, sequence_length=alone))
    return again if known.sliced_layers else replace(again, uncut_reason=known.uncut_reason)


def _traced_on_cpus(request: Request) -> Model:
    """Return the traced model without what GPUs run otherwise, which would double a file: tests run it on CPUs."""
    with patch.object(tracing, "_trace_fused_kernels", lambda *_given: None):
        return traced_model(request)


def trace_files_again(files: Sequence[Path]) -> None:
    """Write those of the files anew whose models are traced otherwise today; print a line for each file."""
    for file in files:
        model, first = traced_again(file), file.read_text(encoding="utf-8").partition("\n")[0]
        same = model == load_model(file)
        if not same:
            _write(file, model, f"{first}\n" if first.startswith("# ") else "")
        print(f"{file}: {'as it was' if same else 'traced otherwise: written anew'}", flush=True)


def _write(path: Path, model: Model, first: str) -> None:
    """Write a model file that begins with the line `first`."""
    write_model(path, model)
    if first:
        write_text(path, first + path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    trace_files_again([Path(name) for name in sys.argv[1:]] or MODELS_OF_TESTS)
