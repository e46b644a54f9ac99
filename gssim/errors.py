"""Exceptions that are shown to users (invalid input, failed runs), and texts in them: one line each, near names."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_WORD = 24
"""Number of characters from which on a word is cut where a line is shortened."""


def one_line(text: str, longest: int | None = None) -> str:
    r"""Return a text for one line of a console: unprintable characters escaped, the middle of a long one left out.

    Words are left out whole, unless one is long itself.

    >>> one_line("a\nb\x1b[31m"), one_line("from the beginning to the end", 20), one_line("x" * 30, 12)
    ('a\\nb\\x1b[31m', 'from the ... end', 'xxxxx ... xx')
    """
    shown = text
    if not text.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    if longest is None or len(shown) <= longest:
        return shown
    last = (longest - 5) // 3
    head, tail = shown[: longest - 5 - last], shown[-last:]
    if (cut := head.rfind(" ", max(0, len(head) - LONGEST_WORD))) > 0:
        head = head[:cut]
    if (cut := tail.find(" ", 0, LONGEST_WORD)) >= 0:
        tail = tail[cut:]
    return f"{head.rstrip()} ... {tail.lstrip()}"


_SAME_IN_OTHER_PROGRAMS = {
    "tp": "tensor_parallel tensor_model_parallel tensor_parallelism",
    "pp": "pipeline_parallel pipeline_model_parallel pipeline_parallelism pipeline_stages",
    "cp": "context_parallel context_parallelism sequence_parallel_size",
    "ep": "expert_parallel expert_model_parallel expert_parallelism",
    "dp_shard": "data_parallel_shard data_parallel dp fsdp_size",
    "dp_replicate": "data_parallel_replicate",
    "micro_batches": "gradient_accumulation_steps grad_accumulation_steps num_microbatches num_micro_batches",
    "recompute": "activation_checkpointing gradient_checkpointing activation_checkpoint recompute_granularity",
    "global_batch_size": "batch train_batch",
    "sequence_length": "seq_length seq_len seqlen max_seq_length max_length context_length",
    "precision": "dtype torch_dtype mixed_precision param_dtype data_type",
    "learning_rate": "lr",
    "clip_norm": "max_grad_norm max_norm gradient_clipping grad_clip clip_grad",
    "fp32": "float32 float",
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp64": "float64 double",
    "ddp": "distributed_data_parallel",
    "fsdp": "fsdp2 fully_shard full_shard",
    "adamw": "adamw_torch adamw_torch_fused fused_adamw",
}
_FIELD_NAMES = {name: ours for ours, names in _SAME_IN_OTHER_PROGRAMS.items() for name in names.split()}


def field_name(name: str) -> str:
    """Return this project's name of a key or value that other programs name otherwise; else the name itself.

    >>> field_name("tensor-model-parallel-size"), field_name("bfloat16"), field_name("tp")
    ('tp', 'bf16', 'tp')
    """
    plain = name.lower().replace("-", "_")
    cut = plain.removesuffix("_size").removesuffix("_degree")
    return _FIELD_NAMES.get(plain) or _FIELD_NAMES.get(cut) or (cut if cut in _SAME_IN_OTHER_PROGRAMS else name)


def nearest_name(name: str, known: Iterable[str], *, least_ratio: float = 0.6) -> str | None:
    """Return the one of the known names that was probably meant; None if none is close.

    It is this project's word for a name of another program, equal but for case, longer with the same beginning, or
    written alike.

    `least_ratio`: of letters in common, as difflib counts them. Endings of files, which all have, make no names alike.

    >>> nearest_name("a100", ["a10", "a100-sxm-80"]), nearest_name("Adam", ["sgd", "adam"])
    ('a100-sxm-80', 'adam')
    >>> nearest_name("none.toml", ["demo.toml"]), nearest_name("dem.toml", ["demo.toml"])
    (None, 'demo.toml')
    """
    names = list(known)
    if (ours := field_name(name)) in names:
        return ours
    folded = name.lower()
    for alike in (str.__eq__, str.startswith):
        candidates = [each for each in names if alike(each.lower(), folded)] if folded else []
        if candidates:
            return min(candidates, key=len)
    stem, _, ending = name.rpartition(".") if "." in name else (name, "", "")
    cut = f".{ending}" if ending else ""
    stems = {each.removesuffix(cut) if cut else each: each for each in reversed(names)}
    close = get_close_matches(stem, stems, n=1, cutoff=least_ratio)
    return stems[close[0]] if close else None


class UserError(ValueError):
    """An error that the user can fix: one line that names the file, the key, the value and what is allowed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))  # names and values may hold anything


class MistakenNameError(UserError):
    """An unknown key or a missing file: probably a typing error."""


class RunFailedError(RuntimeError):
    """A run that failed through no fault of the user: one line that names the rank or command, and the reason."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))
