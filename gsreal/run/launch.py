"""Launcher of a real run: starts the ranks, watches them, and reports which rank failed and why.

Ranks find each other by a file in a folder that only this user can read: torchrun's store would listen on every address
of the machine, and answer anyone. gloo and NCCL listen on the loopback interface, or on the one that is named.

Before the ranks start, `check_real` refuses scenarios that are valid, but cannot run on this machine.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gsreal.compiled import compiler
from gsreal.data.sources import check_data, check_held_out
from gsreal.machine import ENVIRONMENT, check_machine, die_with_parent
from gsreal.methods.stage_modules import check_stages
from gsreal.methods.tensor_slices import check_slices
from gsreal.model_files.build import build_module, check_factory, example_batch
from gsreal.run.forked import Forked, module_run
from gsreal.run.progress import DEFAULT_TIMEOUT_S, REPORTS, Watch
from gsreal.run.rank import LAUNCHER, STORE, TIMEOUT
from gsreal.run.signals import signals_deferred, signals_ignored
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import scratch_folder
from gssim.plan import PREDICTED_ONLY, RUNS_WITH
from gssim.scenario import Loaded, Scenario, routes_parts


def check_real(loaded: Loaded) -> None:
    """Raise UserError if the scenario cannot run on this machine."""
    ours, where = loaded.scenario, loaded.file
    check_factory(ours.workload.model.module, where=where)
    check_predicted_only(ours, where=where)
    check_machine(ours.cluster, ours.ranks, where=where)
    check_data(ours.workload, where=where, seed=ours.run.seed, steps=ours.run.warmup_steps + ours.run.steps)
    check_stages(ours, where=where)
    check_slices(ours, where=where)
    check_evaluation(ours, where=where)
    check_overlap(ours, where=where)
    check_fused(ours, where=where)
    check_offload(ours, where=where)
    check_gloo_on_gpus(ours, where=where)
    check_samples(ours, where=where)
    check_norms(ours, where=where)
    check_compiled(ours, where=where)
    check_experts_in_fp64(ours, where=where)


def check_experts_in_fp64(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if experts would be multiplied in fp64 by Hugging Face's modules: torch has no such product.

    This project's own modules, and experts that ranks divide, are multiplied one by one there.
    """
    model = scenario.workload.model
    routed = any(layer.experts_per_token for layer in model.expert_layers)
    if (
        scenario.workload.precision == "fp64"
        and scenario.policies.ep == 1
        and routed
        and model.module.hugging_face is not None
    ):
        raise UserError(
            f"{where}: workload.precision = 'fp64': torch has no grouped product in fp64, by which Hugging Face's "
            "experts are multiplied; allowed: another precision, or plan.ep of at least 2"
        )


def check_compiled(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if no compiler for compiled blocks is installed, or they would be compiled in a timed step."""
    if not scenario.workload.model.compiled:
        return
    kinds = {each.kind for each in scenario.cluster.device_types.values()}
    if "cuda" in kinds and find_spec("triton") is None:
        raise UserError(f"{where}: workload.model: compiled blocks need triton on a GPU: pip install triton")
    if "cpu" in kinds and compiler() is None:
        raise UserError(f"{where}: workload.model: compiled blocks need a C++ compiler on a CPU: apt-get install g++")
    if scenario.run.warmup_steps == 0:
        raise UserError(
            f"{where}: run.warmup_steps = 0: blocks are compiled in the first step, which must not count; allowed: at "
            "least 1"
        )


def check_predicted_only(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for values that can only be predicted."""
    tensor_ranks = scenario.policies.tp
    if scenario.policies.ep > 1 and tensor_ranks > 1 and not routes_parts(scenario.workload.model, scenario.policies):
        raise UserError(
            f"{where}: plan.ep = {scenario.policies.ep} beside plan.tp = {tensor_ranks}: can be predicted, but "
            "not run, with layers that are cut already (workload.model.expert_tensor_ranks); allowed: one of them"
        )
    for layer in scenario.workload.model.expert_layers:
        if layer.expert_capacity_ratio is not None:
            raise UserError(
                f"{where}: workload.model: experts of '{layer.name}' have a capacity (expert_capacity_ratio): it can "
                "be predicted, but not run, which drops no tokens; leave it out"
            )

    def value_of(key: str) -> object:
        table, _, name = key.partition(".")
        return getattr(getattr(scenario, table), name)

    for (key, value), why in PREDICTED_ONLY.items():
        unless = RUNS_WITH.get((key, value))
        if value_of(key) == value and (unless is None or value_of(unless) is None):
            raise UserError(f"{where}: {key} = {value!r}: {why}")


def check_evaluation(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if a run asks for an evaluation that is impossible; `where` names the file."""
    if scenario.run.evaluate_every_steps is None:
        return
    if scenario.policies.pp > 1:
        raise UserError(
            f"{where}: run.evaluate_every_steps = {scenario.run.evaluate_every_steps}: no rank of a pipeline has the "
            "whole model, and its schedule only trains; leave it out"
        )
    if scenario.plan.loss_parallel:
        raise UserError(
            f"{where}: run.evaluate_every_steps = {scenario.run.evaluate_every_steps}: no rank has whole logits "
            "(plan.loss_parallel); leave one of them out"
        )
    check_held_out(scenario.workload, where=where)


def check_offload(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if gradients in the hosts' memory must be summed over ranks: NCCL has no collectives for them."""
    workload, plan = scenario.workload, scenario.plan
    if plan.offload is None or scenario.cluster.backend != "nccl":
        return
    for key in ("clip_norm", "loss_scale"):
        if getattr(workload, key) is not None:
            raise UserError(
                f"{where}: workload.{key} = {getattr(workload, key)!r}: gradients in the hosts' memory (plan.offload = "
                f"'{plan.offload}') are summed by no NCCL collective: it can be predicted, but not run; leave it out"
            )


def check_gloo_on_gpus(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for collectives of torch's own that gloo does not carry between GPUs: they end in a crash.

    gloo reads messages of a pipeline, and those of functional all-gathers, as if they were in the host's memory.
    """
    cluster, plan = scenario.cluster, scenario.plan
    if cluster.backend != "gloo" or cluster.type_of(0).kind != "cuda":
        return
    if scenario.policies.pp > 1:
        raise UserError(
            f"{where}: plan.pp = {scenario.policies.pp}: pipelines on GPUs can be predicted, but not run, with "
            "cluster.backend = 'gloo'; allowed: 1, or backend 'nccl' with a GPU for each rank"
        )
    if plan.sequence_parallel and scenario.policies.tp > 1:
        raise UserError(
            f"{where}: plan.sequence_parallel = true: on GPUs it can be predicted, but not run, with cluster.backend = "
            "'gloo'; allowed: false, or backend 'nccl' with a GPU for each rank"
        )


def check_samples(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for ranks without samples if a Hugging Face module is trained: it takes no empty batch."""
    module = scenario.workload.model.module
    idle = [rank for rank, samples in enumerate(scenario.batch_sizes) if not samples]
    if module.hugging_face is not None and idle:
        raise UserError(
            f"{where}: plan.shares.batch = {scenario.plan.shares.batch!r}: rank {idle[0]} has no samples: it can be "
            f"predicted, but modules of Hugging Face ('{module.hugging_face.model_type}') run no empty batch; give "
            "each rank at least one"
        )


def check_norms(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if a micro-batch of one sample leaves a batch norm one value of a channel, which has no variance.

    The module's forward tells, on a device that computes nothing.
    """
    model, parts = scenario.workload.model, scenario.plan.micro_batches
    alone = [rank for rank, samples in enumerate(scenario.batch_sizes) if samples // parts == 1]
    if not alone or model.input.kind != "image":
        return
    with torch.device("meta"):
        module = build_module(model.module, where=where)
    if not any(isinstance(each, _BatchNorm) for each in module.modules()):
        return
    inputs, _ = example_batch(model, batch_size=1, sequence_length=None)
    try:
        module(inputs.to("meta"))
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise UserError(
            f"{where}: rank {alone[0]} trains a sample at a time: it can be predicted, but a batch norm of "
            f"'{model.name}' then has one value of each channel, and torch refuses it; allowed: at least two samples "
            "in a micro-batch"
        ) from None


def check_overlap(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan disables overlap, but PyTorch overlaps collectives with compute in any case.

    FSDP2's collectives on gloo do not overlap (they are awaited where they start), and a plan need not say so.
    """
    policies = scenario.policies
    if scenario.plan.overlap or policies.data_ranks == 1:
        return
    said = f"{where}: plan.overlap = false"
    if policies.pp > 1:
        raise UserError(f"{said}: replicas of a pipeline's stages can be predicted so, but not run; allowed: true")
    if policies.gradients == "reduce-scatter" and scenario.cluster.backend == "nccl":
        raise UserError(f"{said}: FSDP2 overlaps on nccl in any case, so it cannot be run; allowed: true")


def check_fused(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for a fused SGD on FSDP2's shards: torch 2.13 has no such operation on DTensors."""
    workload = scenario.workload
    fused = workload.optimizer.startswith("sgd") and workload.optimizer_implementation == "fused"
    if fused and scenario.policies.gradients == "reduce-scatter":
        raise UserError(
            f"{where}: workload.optimizer_implementation = 'fused': torch has no fused SGD for FSDP2's shards: it can "
            "be predicted, but not run; allowed: default, for-loop, foreach"
        )


GRACE_S = 10.0
"""Time that the other ranks get to end, and to report, after one has failed."""
LOOK_S = 0.05
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the interface on which backends listen."""


@dataclass(frozen=True)
class Guard:
    """Timeout of a hanging run, the network interface of its ranks, and locks that it holds."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest time without progress of any rank."""
    interface: str | None = None
    """Network interface on which backends listen; None: the loopback."""
    locks: tuple[int, ...] = ()
    """File descriptors of locks that ranks hold too: kept while a rank writes after its launcher was killed."""


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    max_restarts: int = 0,
    guard: Guard | None = None,
    forked: bool = False,
) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError if one of them fails.

    Up to `max_restarts` times, all of them are restarted instead. No process outlives the call, however it ends.
    `forked`: ranks are forks of this process (see gsreal/run/forked.py), and their progress is not printed.
    """
    guard = guard or Guard()
    for attempt in range(max_restarts + 1):
        starts = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            environment = {**listening_on(guard.interface), **{name: str(value) for name, value in own.items()}}
            command = [module, *arguments] if forked else [sys.executable, "-m", module, *arguments]
            starts.append(Start(command, environment, die_with_parent, forked))
        try:
            run_ranks(starts, guard)
            return
        except RunFailedError as error:
            if attempt == max_restarts:
                raise
            print(f"gsreal: {error}; all ranks are started again", file=sys.stderr, flush=True)


def listening_on(interface: str | None) -> dict[str, str]:
    """Return the environment that makes backends listen on one network interface.

    None: the loopback, or the user's choice.

    Raises UserError if there is no such interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in names:
        raise UserError(f"--interface {interface}: this machine has {', '.join(names)}")
    loopback = next((name for name in names if name in ("lo", "lo0")), None)
    if interface is None and loopback is None:
        return {}
    return {name: interface or os.environ.get(name) or str(loopback) for name in INTERFACES}


@dataclass(frozen=True)
class Start:
    """Command of a rank."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables in addition to those common to all ranks."""
    before: Callable[[], None]
    """Called in the new process before it executes the command."""
    forked: bool = False
    """The command is a module and its arguments, which a fork of this process runs."""


class Rank:
    """A rank's process and its log."""

    def __init__(self, number: int, start: Start, environment: Mapping[str, str], log: Path, guard: Guard) -> None:
        self.number, self.log = number, log
        more = {**environment, **start.environment}
        self.process: Forked | subprocess.Popen[bytes]
        if start.forked:
            with signals_deferred():
                self.process = Forked(module_run(start.command[0], start.command[1:], more), log)
            return
        with log.open("wb") as stream, signals_deferred():
            self.process = subprocess.Popen(
                start.command,
                env={**os.environ, **ENVIRONMENT, **more},
                stdin=subprocess.DEVNULL,
                stdout=stream,  # a user's module may print; our stdout is for the Result alone
                stderr=subprocess.STDOUT,
                preexec_fn=start.before,
                pass_fds=guard.locks,
                start_new_session=True,
            )


def run_ranks(
    starts: Sequence[Start],
    guard: Guard,
    *,
    check: Callable[[], None] = lambda: None,
    explain: Callable[[], str | None] = lambda: None,
) -> None:
    """Run ranks to their end; raise RunFailedError if one of them fails, or none makes progress within the timeout.

    `check` is called periodically, to raise if the ranks' environment has failed; `explain` returns why ranks wait for
    one another, if known. No process outlives the call, however it ends.
    """
    with scratch_folder("gsreal-run-") as reports:
        ranks: list[Rank] = []
        environment = {REPORTS: str(reports), STORE: str(reports / "store"), LAUNCHER: str(os.getpid())}
        environment[TIMEOUT] = str(guard.timeout_s)
        try:
            for number, start in enumerate(starts):
                ranks.append(Rank(number, start, environment, reports / f"rank-{number}.log", guard))
            with ranks[0].log.open(encoding="utf-8", errors="replace") as progress:
                failed = _wait(ranks, reports, None if starts[0].forked else progress, guard.timeout_s, check, explain)
        finally:
            with signals_ignored():
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        rank.process.kill()
                for rank in ranks:
                    rank.process.wait()
        if failed:
            # the exit of a rank that died without a report says more than reports of lost connections
            dead = min(failed, key=lambda rank: (Path(reports, f"rank-{rank.number}.json").exists(), rank.number))
            log = dead.log.read_text(encoding="utf-8", errors="replace")
            code = dead.process.returncode
            assert code is not None, "it has ended: it failed"
            raise RunFailedError(str(reason_of(reports, (dead.number, code), log)))


def _wait(
    ranks: Sequence[Rank],
    reports: Path,
    progress: IO[str] | None,
    timeout_s: float,
    check: Callable[[], None],
    explain: Callable[[], str | None],
) -> list[Rank]:
    """Wait until all ranks have ended, or for a grace time after one has failed; return those that failed.

    The grace time lets the others report their reasons. Rank 0's progress, if given, is passed on meanwhile.
    """
    watch = Watch({rank.number: rank.process.pid for rank in ranks}, reports)
    until_s = float("inf")
    while time.monotonic() < until_s:
        codes = [rank.process.poll() for rank in ranks]
        if progress is not None:
            for line in progress:  # other lines stay in the log for the reason of a failure
                if line.startswith("gsreal:"):
                    sys.stderr.write(line)
                    sys.stderr.flush()
        if None not in codes:
            break
        check()
        if any(codes):
            until_s = min(until_s, time.monotonic() + GRACE_S)
        elif watch.idle_s() > timeout_s:
            diagnosis = watch.finding()
            why = explain() if "wait for one another" in diagnosis else None
            raise RunFailedError(f"no rank has made progress for {timeout_s:g} s (--timeout): {why or diagnosis}")
        time.sleep(LOOK_S)
    return [rank for rank in ranks if rank.process.returncode]


def reason_of(reports: Path, dead: tuple[int, int] | None, log: str) -> str | None:
    """Return why a run failed, from the ranks' reports, or from (rank, exit code) of one that died; None if unknown.

    `log`: output of that rank. Raises UserError if a rank reported a user error.
    """
    reports_read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("rank-*.json"))]
    if reports_read:
        # a rank that loses its peer fails too: a user's fault comes first, then failures that are no lost connections
        reports_read.sort(
            key=lambda report: (report["kind"] != "user", "onnection" in report["message"], report["rank"])
        )
        first = reports_read[0]
        if first["kind"] == "user":
            raise UserError(first["message"])
        if "onnection" not in first["message"] or dead is None:
            return f"rank {first['rank']} failed: {' '.join(first['message'].split())[:500]}"
    if dead is None:
        return None
    rank, exit_code = dead
    cause = f"exit code {exit_code}"
    if exit_code < 0:
        try:
            cause = signal.Signals(-exit_code).name
        except ValueError:  # of the real-time signals only the first and the last have a name
            cause = f"signal {-exit_code}"
    words = re.compile(r"terminate called|what\(\):|Fatal Python error|malloc\(\)|free\(\)|double free|corrupt")
    said = "; ".join(line.strip() for line in log.splitlines() if words.search(line))[:500]
    return f"rank {rank} died ({cause}{f': {said}' if said else ''})"
