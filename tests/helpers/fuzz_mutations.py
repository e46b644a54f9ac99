# ruff: noqa: E501  a command line or a value and what it is for are one line
"""Mutations of files and command lines: seeded, so that a case is made again from its number."""

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gssim.scenario.overrides import toml

NUMBERS = (
    0, -1, 1, 2, 3, 5, 8, 64, 1000, 2**31, 2**31 + 1, 2**53 + 1, 2**63, 10**7, 10**12, 10**15, 10**18, 10**40, 10**400,
    -0.0, 1e-300, 5e-324, 1e-9, 1e-3, 0.5, 0.999, 1.0, 1.5, 2.5, 1e3, 1e9, 1e18, 1e30, 1e97, 1e290, 1e300, 1e308,
    -1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "a - b", "a b", "[/b]", "[bold]x[/bold]", "[red", "[link=file:///x]y[/link]", ":smile:", "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "line\nline", "tab\there", "\r", "\ufeffbom", "\u202eright to left", "\x00", "=1+1",
    "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "$x_{$", "$\\frac$", "\\", "'", '"', "`", "%s %n {0} {}", "<script>1</script>",
    "../../etc/passwd", "/dev/null", "/", ".", "scenario.toml", "pair.toml", "tiny.toml", "x" * 255, "x" * 5000, "é" * 300,
    "1 GB/s", "5 us", "80 GiB", "1e308 GB/s", "1e-300 B/s", "1e300 s", "-1 GB", "nan", "inf", "NaN", "1e3", "0x10", "1_000",
    "throughput", "even", "cost", "gs", "ddp", "zero3", "fp32", "bf16", "gloo", "nccl", "auto", "adam", "true", "lone\ud800",
)  # fmt: skip
OVERRIDES = (
    "run.steps", "run.warmup_steps", "run.seed", "run.slowdowns", "workload.global_batch_size", "workload.sequence_length",
    "workload.learning_rate", "workload.momentum", "workload.weight_decay", "workload.precision", "workload.optimizer",
    "workload.optimizer_implementation", "workload.gradients", "workload.data", "workload.model.name",
    "workload.model.layers.0.repeats", "workload.model.layers.1.forward_flop", "workload.model.layers.0.buffers",
    "plan.method", "plan.tp", "plan.pp", "plan.dp_replicate", "plan.dp_shard", "plan.micro_batches", "plan.recompute",
    "plan.push.threshold", "plan.push.kind", "plan.push.encoding", "plan.push.warmup_steps", "plan.push.error_feedback",
    "plan.push.reestimate_steps", "plan.publish.threshold", "plan.publish.kind", "plan.shares.batch", "plan.shares.shards",
    "plan.shares.replan", "plan.shares.replanning.ewma_weight", "plan.shares.replanning.drift_limit", "plan.bucket_bytes",
    "plan.first_bucket_bytes", "plan.exchange", "plan.overlap", "plan.schedule", "plan.stages", "network.faults",
    "network.traffic", "cluster.links.0.bandwidth_bytes_per_s", "cluster.links.0.latency_s", "cluster.devices.0.name",
    "cluster.device_types.fast.memory_bytes", "cluster.device_types.fast.peak_flop_per_s.fp32",
    "cluster.device_types.fast.step_jitter_ratio", "cluster.device_types.fast.task_jitter_ratio",
    "cluster.device_types.fast.operation_overhead_s", "cluster.device_types.fast.kind", "cluster.backend", "cluster.name",
    "cluster.device_types.fast.neighbour_slowdown_ratio", "cluster.device_types.fast.price_usd_per_h",
    "cluster.device_types.fast.busy_power_w", "cluster.backend_cost.message_s", "cluster.backend_cost.posting_byte_s",
    "cluster.algorithms.all-reduce", "cluster.nccl", "cluster.topology", "search.least_density", "search.seconds",
    "search.thresholds", "search.micro_batches", "search.tp", "name", "question", "",
)  # fmt: skip
COMPOSITE = (
    [], {}, [[]], [{}], [1], [0.5, 0.5], [1, 2, 3], ["a", "b"], None, True, False, [None], {"": 1}, {"kind": "ring"},
    [{"rank": 0, "first_step": 0, "compute_ratio": 1e300}], [{"rank": 1, "first_step": 1, "steps": 2, "compute_ratio": 2}],
    [{"between": ["a", "b"], "bandwidth_ratio": 1e-300}], [{"between": ["a", "b"], "bytes_per_s": 1e300}],
    [{"between": ["a", "b"], "added_latency_s": 1e300}], [1e-300, 1.0], [0, 0], [1.0], {"preset": "pcie4x16"},
)  # fmt: skip


def value_of(draw: random.Random, old: Any = None) -> Any:
    """Return a value in the place of another: of its kind as a rule, extreme; at times of another kind."""
    kind = draw.random()
    if isinstance(old, bool) and kind < 0.5:
        return not old
    if isinstance(old, (int, float)) and not isinstance(old, bool):
        if kind < 0.3:
            return type(old)(draw.choice((old * 2, old + 1, old - 1, old // 2, -old, old * 10)))
        if kind < 0.85:
            return draw.choice(NUMBERS)
    elif isinstance(old, str) and kind < 0.75:
        return draw.choice((*TEXTS, old * 2, old[: len(old) // 2], f"{old} ", f"{old}[/b]", f"={old}", f"{old}\n"))
    return draw.choice(
        (draw.choice(NUMBERS), draw.choice(TEXTS), draw.choice(COMPOSITE), nested(draw.choice((40, 3000))))
    )


def nested(depth: int) -> Any:
    """Return lists inside each other."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything inside tables and lists; of long lists, their first entries'."""
    found = []
    inside = data.items() if isinstance(data, dict) else enumerate(data[:6]) if isinstance(data, list) else ()
    for key, value in inside:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def mutate_data(draw: random.Random, data: Any) -> Any:
    """Return tables and lists with one to three changes; the data are changed too."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        known = places(data)
        if not known:
            return value_of(draw)
        *above, last = draw.choice(known)
        table = data
        for key in above:
            table = table[key]
        how = draw.random()
        if how < 0.12:
            del table[last]
        elif how < 0.2 and isinstance(table, dict):
            table[draw.choice(("unknown", str(last) + "s", "kind", "preset", "name", draw.choice(TEXTS)))] = value_of(
                draw
            )
        elif how < 0.26 and isinstance(table, list):
            table.extend([table[last]] * draw.choice((1, 3, 300)))
        elif how < 0.3 and isinstance(table, dict):
            table[draw.choice(list(table))] = table[last]
        else:
            table[last] = value_of(draw, table[last])
    return data


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return a file's bytes, damaged."""
    at = draw.randrange(len(content) + 1)
    length = draw.choice((1, 1, 2, 8, 64, 1000))
    match draw.randrange(9):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + length :]
        case 2:
            return content[:at] + draw.randbytes(length) + content[at + length :]
        case 3:
            return content[:at] + content[at : at + length] * 3 + content[at + length :]
        case 4:
            return b"\xef\xbb\xbf" + content
        case 5:
            return content.replace(b"\n", b"\r\n")
        case 6:
            return content[:at] + draw.choice((b"\x00", b"[" * 5000, b"{" * 5000, b'"', b"\n", b"=", b"1e999", b"]"))
        case 7:
            lines = content.splitlines(keepends=True)
            draw.shuffle(lines)
            return b"".join(lines)
        case _:
            return draw.choice(
                (b"", b"\n", b"{}", b"[]", b"null", b"\xff\xfe", b"PAR1", b'{"schema": "gssim.result/1"}')
            )


def mutate_text(draw: random.Random, text: str) -> str:
    """Return a text in which a word is another one."""
    separators = draw.choice((",", "\n", '"', " "))
    parts = text.split(separators)
    at = draw.randrange(len(parts))
    word = draw.choice((str(draw.choice(NUMBERS)), draw.choice(TEXTS)))
    parts[at : at + draw.choice((1, 1, 1, 0))] = [word]
    return separators.join(parts)


def mutate_file(draw: random.Random, file: Path) -> None:
    """Damage a file: its data if it can be read, its text, or its bytes."""
    content, how = file.read_bytes(), draw.random()
    if how < 0.7 and file.suffix in (".toml", ".json", ".yaml"):
        readers: dict[str, Callable[[str], Any]] = {
            ".toml": tomllib.loads,
            ".json": json.loads,
            ".yaml": yaml.safe_load,
        }
        data = mutate_data(draw, readers[file.suffix](content.decode()))
        if file.suffix == ".json":
            text = json.dumps(data)
        elif file.suffix == ".yaml":
            text = yaml.safe_dump(data, allow_unicode=True)
        else:
            text = (
                "\n".join(f"{json.dumps(k, ensure_ascii=False)} = {toml(v)}" for k, v in data.items())
                if isinstance(data, dict)
                else toml(data)
            )
            text = ("# " + draw.choice(TEXTS).split("\n")[0] + "\n" if draw.random() < 0.2 else "") + text
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif how < 0.7 and file.suffix == ".parquet":
        mutate_parquet(draw, file)
    elif how < 0.85 and file.suffix != ".parquet":
        file.write_bytes(mutate_text(draw, content.decode("utf-8", "replace")).encode("utf-8", "surrogatepass"))
    else:
        file.write_bytes(mutate_bytes(draw, content))


def mutate_parquet(draw: random.Random, file: Path) -> None:
    """Write a table with a column that is missing, of another name or type, or of other values."""
    import polars as pl

    table = pl.read_parquet(file)
    name = draw.choice(table.columns)
    match draw.randrange(5):
        case 0:
            table = table.drop(name)
        case 1:
            table = table.rename(
                {name: draw.choice([each for each in TEXTS if each not in table.columns and each != "lone\ud800"])}
            )
        case 2:
            column: list[Any] = [draw.choice(TEXTS[:40]) for _ in range(table.height)]
            table = table.with_columns(pl.Series(name, column, dtype=pl.String))
        case 3:
            numbers = [float(n) if n < 10**300 else float("inf") for n in NUMBERS]
            table = table.with_columns(pl.Series(name, [draw.choice(numbers) for _ in range(table.height)]))
        case _:
            table = draw.choice((table.head(0), table.with_columns(pl.lit(None).alias(name)), pl.concat([table] * 40)))
    table.write_parquet(file, metadata={"schema": "gssim.table/1", "question": draw.choice(TEXTS[:40]), "sweep": "x"})


PLACES = (
    "", ".", "/", "..", "none.toml", "x" * 300, "scenario.toml", "scenario.toml/x", "/proc/none/x", "/dev/full", "/dev/zero",
    "/dev/null", "/proc/self/mem", "binary", "empty", "none/such/folder/x.csv", "a\nb", "[/b].toml", "-", "\udcff",
)  # fmt: skip
"""Paths that are missing, folders, devices, or files that cannot be read or written."""


def mutate_option(draw: random.Random, words: list[str], options: dict[str, type], files: list[str]) -> list[str]:
    """Return a command line with an extreme value of one of its options (by name: its type), or of a file that it reads."""
    if files and draw.random() < 0.3:
        file = draw.choice(files)
        place = draw.choice(PLACES)
        return [place if word == file.rstrip("/") else word for word in words]
    name = draw.choice(sorted(options))
    kind = options[name]
    if kind is bool:
        return [*words, name]
    values: dict[type, tuple[Any, ...]] = {Path: PLACES, int: NUMBERS, float: NUMBERS, str: (*TEXTS, *PLACES)}
    value = str(draw.choice(values[kind])).replace("\x00", "")
    value = value.encode("utf-8", "surrogateescape" if "\ud800" not in value else "replace").decode(
        "utf-8", "surrogateescape"
    )
    if name in words[:-1]:  # in its place
        at = words.index(name) + 1
        return [*words[:at], value, *words[at + 1 :]]
    return [*words, name, value]


def mutate_words(draw: random.Random, words: list[str]) -> list[str]:
    """Return a command line with one to three changes."""
    words = list(words)
    for _ in range(draw.choice((1, 1, 2, 3))):
        how, at = draw.random(), draw.randrange(1, len(words) + 1)
        if how < 0.55 and words[0] not in (
            "keys",
            "timeline",
            "draw",
            "report",
            "literature",
            "compare",
            "trace",
            "cluster",
            "models",
            "validate",
        ):
            value = value_of(draw, draw.choice((1, 1.0, "x")))
            written = (
                json.dumps(value, ensure_ascii=False) if isinstance(value, str) and draw.random() < 0.5 else toml(value)
            )
            words += [
                "--set",
                f"{draw.choice(OVERRIDES)}={value if isinstance(value, str) and draw.random() < 0.3 else written}",
            ]
        elif how < 0.65:
            del words[at - 1 if at > 1 else at : at]
        elif how < 0.8:
            words.insert(
                at,
                draw.choice(
                    (*TEXTS, "--json", "--out", "--help", "--set", "--jobs", "--", "-1", "--no-such", "--trace")
                ),
            )
        elif at < len(words):
            words[at] = draw.choice((draw.choice(TEXTS), str(draw.choice(NUMBERS))))
    return [
        word.replace("\x00", "")
        .encode("utf-8", "surrogateescape" if "\ud800" not in word else "replace")
        .decode("utf-8", "surrogateescape")
        for word in words
    ]
