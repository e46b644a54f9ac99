"""Published training runs as scenarios: their keys and values, their files, and their predictions.

A scenario has the same keys as a scenario file, with the tables of the cluster and the model in place. `literature`
predicts it as `gssim run` does, in one process or several, and writes it with `--emit`. What a run's software does is
in its model's table (`transformer`); the rest are keys that every scenario has.
"""

import hashlib
import re
import signal
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter

import gssim
from analysis.literature.kernels import KernelUse
from analysis.literature.mixture import ExpertRanks, weight_shapes
from analysis.literature.platforms import (
    Platform,
    Server,
    cluster_of,
    cluster_tables,
    platform_of,
    servers_of,
)
from analysis.literature.runs import Measured, Run, SkippedError, UnscoredError
from analysis.literature.transformer import transformer
from gssim.cluster import Cluster, Link, presets
from gssim.execution.files import check_place, write_text
from gssim.interop.plan_entries import ONE_BUCKET
from gssim.plan import DATA_AXES, METHODS
from gssim.scenario import achieved_flop_per_s
from gssim.units import PRECISION_BYTES, validated
from gssim.workload import Model

MOST_RANKS, MOST_BLOCKS = 2**16, 2**10
"""Limits on the size of a run; a larger value is taken for a typing error in the table."""


def scenario_of(run: Run) -> gssim.Scenario:
    """Return the scenario of a run; raise SkippedError where its figures contradict each other, or gssim refuses it."""
    _check_consistency(run)
    try:
        return gssim.load(tables_of(run))
    except gssim.UserError as error:
        raise refused(error) from None


def refused(error: gssim.UserError) -> SkippedError:
    """Return the reason for skipping a row whose plan gssim refuses: the error without the row's own name."""
    return SkippedError(f"gssim refuses the plan: {str(error).partition(': ')[2] or error}")


def _check_consistency(run: Run) -> None:
    """Raise SkippedError for a run whose figures contradict each other, or are too large to be meant."""
    shape, software = run.shape, run.software
    if run.ranks > MOST_RANKS or shape.layers > MOST_BLOCKS:
        raise SkippedError("more GPUs or layers than any run has")
    if shape.heads % run.tp or shape.query_width % shape.heads or shape.heads % shape.kv_heads:
        raise SkippedError("heads do not divide evenly")
    if shape.sequence_length % software.context_ranks:
        raise SkippedError("sequences do not divide evenly")
    if shape.decoder is not None and run.pp > 1:
        raise SkippedError("an encoder and a decoder on several stages")
    if run.pp * run.chunks > shape.layers:
        raise SkippedError("more stages than layers")


def tables_of(run: Run) -> dict[str, Any]:
    """Return a run's scenario as a file has it, cluster and model as tables; raise SkippedError for an unknown GPU."""
    if run.measured is not None:
        return _measured_tables(run, run.measured)
    software = run.software
    counted = _counted_context_ranks(run)
    ties = run.shape.ties and (run.pp == 1 or run.sums_tied_gradients)
    use = _kernel_use(run) if software.kernels is not None else None
    divided = ExpertRanks(run.ep, run.etp) if run.shape.experts is not None else None
    across = ties and run.pp > 1
    model = transformer(run.shape, software, tp=run.tp, tied=ties, across=across, use=use, divided=divided)
    figures = [f"{run.step_s:.6g} s a step"] if run.step_s else []
    if run.memory_bytes and run.memory_metric:
        rank = "the last rank" if run.memory_of == "last" else "the rank that needs most"
        figures.append(f"{run.memory_bytes / 2**30:.4g} GiB ({run.memory_metric}) on {rank}")
    # row ids may hold any character; files may be named after scenarios
    name = "".join(char if char.isprintable() and char != "/" else "-" for char in run.identity) or "row"
    tables: dict[str, Any] = {
        "name": name,
        "question": f"{run.source}: measured {' and '.join(figures) or 'nothing'}",
        "cluster": _cluster_tables_of(run),
        "workload": {
            "model": TypeAdapter(Model).dump_python(model, mode="json", exclude_none=True),
            "global_batch_size": run.dp * counted * run.micro_batch * run.micro_batches,
            "sequence_length": run.shape.sequence_length // counted,
            "precision": software.precision,
            "optimizer": run.optimizer,
            "optimizer_implementation": "fused",
        },
        "plan": plan_of(run),
    }
    if software.float8_maps:
        tables["workload"]["map_precision"] = "fp8"
    if software.float_gradients:
        tables["workload"]["gradient_precision"] = "fp32"
    if run.float_reduction and run.dp * software.context_ranks > 1:
        tables["workload"]["reduce_precision"] = "fp32"
    if run.clip_norm is not None:
        tables["workload"]["clip_norm"] = run.clip_norm
    if run.scales_loss:
        tables["workload"]["loss_scale"] = "dynamic"
    if run.micro_batches > 1:
        tables["run"] = {"extrapolate_micro_batches": True}
    return tables


def _cluster_tables_of(run: Run) -> dict[str, Any]:
    """Return a run's cluster as a file has it, with what its software and its hosts change of devices and calls."""
    software, platform = run.software, platform_of(run.gpu)
    cluster = cluster_tables(servers_of_run(run), software.precision, software.tensor_float)
    if platform is not None and platform.calls:
        ranks = run.tp if run.tp > 1 else run.dp * software.context_ranks
        cluster["backend_cost"] = _call_overheads(platform, ranks, run.ep)
    known = validated(Cluster, cluster, file=run.identity).device_types
    operation_s = max(device.operation_overhead_s for device in known.values())
    if run.pp > 1 and software.message_calls:
        cluster["backend_cost"] = _message_costs(run, software.operation_overhead_s or operation_s)
    if software.lists_ranks and run.method == "zero3":
        cluster["backend_cost"] = _list_overheads(run, operation_s)
    kept = run.deferred_outputs
    if software.operation_overhead_s is None and not software.dummy_gradients and not kept:
        return cluster
    for name, device in cluster["device_types"].items():
        changes: dict[str, Any] = {"source": f"{known[name].source}; {run.source}"}
        if software.operation_overhead_s is not None:
            changes["operation_overhead_s"] = software.operation_overhead_s
            changes["source"] += ": overhead of an operation"
        if software.dummy_gradients:
            changes["workspace_bytes"] = known[name].workspace_bytes + _dummy_gradient_bytes(run)
            changes["source"] += ": dummy gradients of Transformer Engine"
        if kept:
            # of a micro-batch, the gradient of the logits on a tensor rank, and the output layer's input
            tokens = run.micro_batch * run.shape.sequence_length // software.context_ranks
            values = tokens * (run.shape.vocabulary // run.tp + run.shape.hidden)
            workspace_bytes = changes.get("workspace_bytes", known[name].workspace_bytes)
            changes["workspace_bytes"] = workspace_bytes + kept * PRECISION_BYTES[software.precision] * values
            changes["source"] += f": what {kept} micro-batches keep of the output layer, as of the last stage"
        cluster["device_types"][name] = ({"preset": device} if isinstance(device, str) else device) | changes
    return cluster


def _message_costs(run: Run, operation_s: float) -> dict[str, Any]:
    """Return the host time of a message between stages, if `operation_s` is that of an operation."""
    software, platform = run.software, platform_of(run.gpu)
    costs = {"posting_s": software.message_calls * operation_s, "source": f"{run.source}: messages between stages"}
    if software.unpacking_calls:
        costs["unpacking_s"] = software.unpacking_calls * operation_s
        if platform is not None and platform.host_core_bytes_per_s is not None:
            whole = run.tp if software.partitioned else 1  # of a message, of which a tensor rank sends its part
            costs["unpacking_byte_s"] = software.host_passes * whole / platform.host_core_bytes_per_s
    return costs


def _call_overheads(platform: Platform, ranks: int, expert_ranks: int) -> dict[str, Any]:
    """Return the backend costs of calls of collectives beyond links' latencies, where they were measured.

    `expert_ranks`: number of ranks that divide experts, among which there are all-to-alls.
    """
    link = {"between": ["a", "b"], **presets("links")[platform.inside_link]}
    link_s = validated(Link, link, file="links").latency_s
    fixed = {"all-to-all": platform.exchange_fixed_s.get(str(expert_ranks), 0.0)}
    overhead_s = {
        kind: fixed_s + fixed.get(kind, 0.0) + (among - 1) * max(0.0, other_s - link_s)
        for kind, (fixed_s, other_s) in platform.calls.items()
        for among in [expert_ranks if kind in fixed else ranks]
    }
    return {"overhead_s": overhead_s, "source": "analysis/literature/platforms.toml"}


def _list_overheads(run: Run, operation_s: float) -> dict[str, Any]:
    """Return the backend costs of a block's collectives if each tensor has a call with a list of the ranks' parts.

    Each part is an operation that the host launches. Vectors are not gathered (`param_persistence_threshold`).
    """
    tensors = transformer(run.shape, run.software, tp=run.tp, tied=run.shape.ties).layers[1].parameters
    matrices = [parameter for parameter in tensors if len(parameter.shape) > 1]
    rank_s = {"all-gather": len(matrices) * operation_s, "reduce-scatter": len(tensors) * operation_s}
    return {
        "overhead_s": {kind: 2 * part_s for kind, part_s in rank_s.items()},  # a call's overhead with two ranks
        "overhead_rank_s": rank_s,
        "source": f"{run.source}: lists of all ranks' parts",
    }


def _dummy_gradient_bytes(run: Run) -> int:
    """Return the bytes of one tensor for each distinct weight shape of a block's linear layers, on one tensor rank.

    In a pipeline whose first blocks alone have no experts, these are the bytes on the other stages, because one of
    those needs most.
    """
    shape = run.shape
    if shape.latent is not None and shape.experts is not None:
        shapes = weight_shapes(shape, dense=run.pp == 1)
        return PRECISION_BYTES[run.software.precision] * sum(a * b for a, b in shapes)
    maps = 3 if shape.kind == "llama" else 2
    elements = shape.hidden * (2 * shape.hidden + 2 * shape.kv_width + maps * shape.ffn)
    return PRECISION_BYTES[run.software.precision] * elements // run.tp


def _kernel_use(run: Run) -> KernelUse:
    device = cluster_of_run(run).device_types["gpu"]
    assert run.software.kernels is not None
    rate = achieved_flop_per_s(device, run.software.precision)
    return KernelUse(run.software.kernels, run.micro_batch, rate, device.memory_bandwidth_bytes_per_s, run.ep)


RATE_FLOP_PER_S = 1e12
"""Rate at which measured compute is expressed as FLOP: the time does not depend on it."""


def _measured_tables(run: Run, measured: Measured) -> dict[str, Any]:
    """Return the scenario of a run whose table states compute and network: a layer with all parameters on each host.

    Forward and backward take a third and two thirds of the compute, which includes the update. The copies of a
    synchronization stream the device's memory, and each host has a link of the measured rate to a switch.
    """
    flop = measured.compute_s * RATE_FLOP_PER_S
    layer = {
        "name": "all",
        "modules": ["all"],
        "parameters": [f"{{}}.weight {measured.parameters} b0 b1"],
        "forward_flop": round(flop / 3),
        "backward_flop": round(2 * flop / 3),
        **dict.fromkeys(("forward_bytes", "backward_bytes", "saved_bytes", "output_bytes"), 0),
        **dict.fromkeys(("forward_operations", "backward_operations"), 0),
    }
    source = f"{run.source}: measured compute and exchange"
    device = {
        "preset": "l40s",
        "peak_flop_per_s": {"fp32": RATE_FLOP_PER_S},
        "efficiency_ratio": 1.0,
        "operation_overhead_s": 0.0,
        "source": source,
    }
    link = {"bandwidth_bytes_per_s": measured.link_bytes_per_s, "latency_s": 0.0, "source": source}
    every = measured.sync_every_steps
    return {
        "name": run.identity,
        "question": f"{run.source}: measured {run.step_s:.6g} s an outer step",
        "cluster": {
            "name": f"{run.ranks} hosts",
            "backend": "gloo",
            "source": source,
            "device_types": {"gpu": device},
            "switches": ["switch"],
            "devices": [{"name": f"gpu{i}", "type": "gpu", "host": f"host{i}"} for i in range(run.ranks)],
            "links": [{"between": [f"gpu{i}", "switch"], **link} for i in range(run.ranks)],
        },
        "workload": {
            "model": {
                "name": "measured",
                "source": source,
                "traced_batch_sizes": [1],
                "module": {"factory": "published.measured"},
                "input": {"kind": "tokens", "vocabulary": 2, "maximum_sequence_length": run.shape.sequence_length},
                "layers": [layer],
            },
            "global_batch_size": run.dp * run.micro_batch,
            "sequence_length": run.shape.sequence_length,
            "optimizer": "sgd",
        },
        "plan": {"method": run.method, **({} if every is None else {"sync_every_steps": every})},
        "run": {"steps": max(20, every or 1)},
    }


def servers_of_run(run: Run) -> tuple[Server, ...]:
    """Return the servers of a run in rank order; raise SkippedError for an unknown GPU."""
    if any(platform_of(gpu) is None for gpu in (dict(run.servers) or (run.gpu,))):
        raise SkippedError("a GPU that platforms.toml does not know")
    return run.servers or servers_of(run.gpu, run.ranks, run.per_node)


def plan_of(run: Run) -> dict[str, Any]:
    """Return the parallel plan of a run."""
    axis, counted = METHODS[run.method].axis, _counted_context_ranks(run)
    plan: dict[str, Any] = {
        "method": run.method,
        "tp": run.tp,
        "micro_batches": run.micro_batches,
        "recompute": run.recompute,
        "overlap": run.overlap,
    }
    if axis in DATA_AXES and run.method != "single":
        plan[axis] = run.dp * counted
    if run.shards is not None and axis == "dp_shard":
        plan |= {"dp_shard": run.shards, "dp_replicate": run.dp * counted // run.shards}
    if run.ep > 1:
        plan["ep"] = run.ep
        if run.etp not in (None, run.tp):
            plan["etp"] = run.etp
    plan |= _features(run)
    if run.pp > 1:
        plan["pp"] = run.pp
        if run.software.receives_in_flight:
            plan["receive_buffers"] = "in-flight"
        plan["stages"] = list(stages_of(run))
        filled = "1f1b" if run.micro_batches >= run.pp else "gpipe"
        plan["schedule"] = "interleaved" if run.chunks > 1 else filled
        if run.software.serial_messages:
            plan["schedule"] = "deepspeed"
    if (run.method == "ddp" or run.flat_optimizer) and not run.overlap:
        plan["bucket_bytes"] = ONE_BUCKET
    return plan


def _features(run: Run) -> dict[str, Any]:
    """Return the keys of a plan that say how context ranks, tensor ranks and the optimizer communicate."""
    software, keys = run.software, dict[str, Any]()
    if software.rings:  # torch's default gathers all keys at once
        exchange = "ring" if software.overlaps_rings else "gather"
        keys |= {"cp": software.context_ranks, "context_exchange": exchange, "context_overlap": software.overlaps_rings}
    beside = {"tp_overlap": software.pipelined_maps, "async_input_gradients": software.sums_beside_products}
    keys |= {key: True for key, is_beside in beside.items() if is_beside}
    if run.flat_optimizer and run.method == "zero1":
        keys["zero1_implementation"] = "megatron"
    if run.gathers_beside_forward:
        keys["publish"] = {"overlap": True}
    return keys


def _counted_context_ranks(run: Run) -> int:
    """Return the number of ranks of a sequence that count as data ranks; see `Software.rings`."""
    return 1 if run.software.rings else run.software.context_ranks


def stages_of(run: Run) -> tuple[int, ...]:
    """Return the number of layers of every stage: blocks, the embedding in the first, the head in the last."""
    stages, blocks = run.pp * run.chunks, run.shape.layers
    counts = list(run.blocks_of_stages or (blocks * (i + 1) // stages - blocks * i // stages for i in range(stages)))
    counts[0] += 1
    counts[-1] += 1 + run.shape.further
    return tuple(counts)


def cluster_of_run(run: Run) -> Cluster:
    """Return the cluster of a run; raise SkippedError for an unknown GPU."""
    if run.measured is not None:
        return validated(Cluster, tables_of(run)["cluster"], file=run.identity)
    return cluster_of(servers_of_run(run), run.software.precision, run.software.tensor_float)


# Predictions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Predicted step time and peak memory of a run (memory of the rank that needs most, or as `Run.memory_of`)."""

    step_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


def predict(run: Run) -> Prediction:
    """Return the prediction for a run; raise SkippedError where the project cannot predict it."""
    try:
        result = gssim.simulate(scenario_of(run))
    except gssim.UserError as error:
        raise refused(error) from None
    ranks = result.ranks
    if run.memory_of == "last":
        ranks = tuple(rank for rank in ranks if run.ranks - 1 in rank.ranks)
    reserved = max(rank.peak_reserved_bytes or rank.peak_allocated_bytes for rank in ranks)
    periods = result.periods  # the outer step is what was measured
    return Prediction(
        step_s=result.step_time_s if periods is None else periods.outer_step_time_s,
        allocated_bytes=max(rank.peak_allocated_bytes for rank in ranks),
        reserved_bytes=reserved,
        device_bytes=reserved + max(sum(rank.outside_bytes.values()) for rank in ranks),
    )


INTERRUPTED = "not reached before the interrupt"


@dataclass(frozen=True)
class NoPrediction:
    """The reason for a run's missing prediction."""

    reason: str
    fault: str = ""
    """Traceback, where the project's own code failed."""


Outcome = Prediction | NoPrediction


def predict_runs(
    runs: Sequence[Run], *, jobs: int = 1, on_done: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Return the outcome of each run; runs that differ only in id and measured figures are predicted once.

    `on_done` is called with the index of each run as it ends. After an interrupt the finished outcomes are returned,
    the others as missing.
    """
    indices: dict[Run, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        question = replace(run, identity="", source="", step_s=None, memory_bytes=None, memory_metric=None)
        indices[question].append(i)
    duplicates = list(indices.values())
    distinct = [runs[same[0]] for same in duplicates]
    outcomes: list[Outcome] = [NoPrediction(INTERRUPTED)] * len(runs)
    try:
        for number, outcome in _completed(distinct, min(jobs, len(distinct))):
            for i in duplicates[number]:
                outcomes[i] = outcome
                on_done(i)
    except KeyboardInterrupt:
        pass
    return outcomes


def _completed(runs: Sequence[Run], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Yield the index and outcome of each run as it ends."""
    if jobs <= 1:
        yield from ((i, predict_or_explain(run)) for i, run in enumerate(runs))
        return
    # workers ignore interrupts: the process that submits the runs handles them
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignored
    ) as pool:
        try:
            # the longest first, so that no long run is left alone at the end
            order = sorted(range(len(runs)), key=lambda i: -runs[i].pp * runs[i].chunks)
            futures = {pool.submit(predict_or_explain, runs[i]): i for i in order}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def predict_or_explain(run: Run) -> Outcome:
    """Return the prediction of a run, or the reason that there is none; no exception of one run ends the others."""
    try:
        return predict(run)
    except SkippedError as reason:
        return NoPrediction(str(reason))
    except Exception as error:
        return NoPrediction(
            f"internal error ({type(error).__name__})", fault=f"{run.identity}: {traceback.format_exc()}"
        )


# Files ---------------------------------------------------------------------------------------------------------------

LONGEST_NAME = 120
"""Characters of a file's name, without its ending."""


def emit(runs: Iterable[Run | SkippedError], folder: Path) -> tuple[list[Path], Counter[str]]:
    """Write the scenarios of runs as files; return their paths, and the number of rows without one, by reason.

    Rows that have nothing to score are written too. Beside the scenarios are the models and clusters that they name,
    each once. Nothing is written where a place is taken by something else (UserError).
    """
    files: dict[str, str] = {}
    scenarios: list[str] = []
    skipped: Counter[str] = Counter()
    for row in runs:
        try:
            if isinstance(row, SkippedError) and not isinstance(row, UnscoredError):
                raise row
            run = row.run if isinstance(row, UnscoredError) else row
            scenario_of(run)
        except SkippedError as reason:
            skipped[str(reason)] += 1
            continue
        scenarios.append(_add_scenario(files, run))
    for path in files:
        check_place(folder / path)
    for path, text in files.items():
        write_text(folder / path, text)
    return [folder / path for path in scenarios], skipped


def _add_scenario(files: dict[str, str], run: Run) -> str:
    """Add a run's scenario to files (content by path), with its model and cluster; return the scenario's path."""
    tables = tables_of(run)
    model = f"{run.shape.kind}-{run.shape.layers}x{run.shape.hidden}"
    tables["workload"]["model"] = _add_part(files, f"models/{model}", tables["workload"]["model"])
    tables["cluster"] = _add_part(files, f"clusters/{_file_name(tables['cluster']['name'])}", tables["cluster"])
    name, number = _file_name(run.identity), 1
    while (path := f"{name}{f'-{number}' if number > 1 else ''}.toml") in files:
        number += 1
    files[path] = tomli_w.dumps(tables)
    return path


def _add_part(files: dict[str, str], path: str, tables: Mapping[str, Any]) -> str:
    """Add a file of tables; return its path, which ends in a digest of the content: equal parts share a file."""
    text = tomli_w.dumps(tables, multiline_strings=False, indent=2)
    path = f"{path}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    files[path] = text
    return path


def _file_name(name: str) -> str:
    """Return a name for a file.

    >>> _file_name("A100-SXM-80GB, 4 cards")
    'A100-SXM-80GB-4-cards'
    """
    return re.sub(r"[^\w.+=]+", "-", name).strip("-.")[:LONGEST_NAME] or "row"
