"""Runs on every rank of a test: trainings with compressed gradients, beside the same written out on one rank.

Arguments: a JSON file of cases {name: {"scenario": FILE, "overrides": [...]}} and the file to write.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from rank_training import cases_in, full_parameters, largest_difference, meet, scenario_of_case, write_found
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from gsreal.measure import Timeline
from gsreal.methods.compressed import Compressor, LowRankCompressor
from gsreal.model_files.build import logits_of, loss_of
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build
from gssim.plan.plan import PowerSGD, TopK, low_rank_of
from gssim.scenario import Scenario, single_device

STEPS = 6
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]
"""Gradients by parameter name."""
Buckets = dict[int, tuple[list[str], list[Tensor]]]
"""By index: the names of a bucket's gradients in order, and the factors Q that were or would be drawn in each step."""


def main(cases_file: str, out: str) -> None:
    meet()
    found = {}
    for name, case in cases_in(cases_file).items():
        scenario = scenario_of_case(case)
        trained, buckets = _trained(scenario)
        plain = _trained_alone(scenario)
        hooked = _by_torch(scenario, buckets) if case.get("by_torch") else None
        if dist.get_rank() == 0:
            expected = written_out(scenario, buckets)
            found[name] = {
                "difference": largest_difference(trained, expected),
                "uncompressed": largest_difference(trained, plain),
                "to_torch": None if hooked is None else largest_difference(trained, hooked),
                "buckets": len(buckets),
            }
    write_found(found, out)


def _trained(scenario: Scenario) -> tuple[dict[str, Tensor], Buckets]:
    """Return the parameters after the training, and its buckets as they were first compressed."""
    training, feed = build(scenario, Timeline(dist.get_rank(), CPU), CPU), Feed(scenario, dist.get_rank(), CPU)
    compressor, buckets = training.compressor, Buckets()
    assert compressor is not None
    begin = compressor.begin

    def noting(pending: Any) -> None:
        names = {p.grad.data_ptr(): n for n, p in training.module.named_parameters() if p.grad is not None}
        parts = [names[part.data_ptr()].removeprefix("module.") for part in pending.parts]
        draws = buckets.setdefault(pending.index, (parts, []))[1]
        if isinstance(compressor, LowRankCompressor):
            random = compressor.random.get_state()
            draws.append(torch.randn(_columns(compressor, pending), generator=compressor.random, dtype=torch.float64))
            compressor.random.set_state(random)
        begin(pending)

    compressor.begin = noting  # type: ignore[method-assign]
    for step in range(STEPS):
        training.step(*feed.at(step), dist.get_rank())
    return full_parameters(training.module), buckets


def _columns(compressor: LowRankCompressor, pending: Any) -> int:
    shapes = [low_rank_of(compressor.options, part.shape) for part in pending.parts]
    return sum(shape[1] * shape[2] for shape in shapes if shape)


def _trained_alone(scenario: Scenario) -> dict[str, Tensor]:
    alone = single_device(scenario)
    training, feed = build(alone, Timeline(0, CPU), CPU), Feed(alone, 0, CPU)
    for step in range(STEPS):
        training.step(*feed.at(step), 0)
    return full_parameters(training.module)


def written_out(scenario: Scenario, buckets: Buckets) -> dict[str, Tensor]:
    """Return all parameters after the same steps of all ranks, one after the other, compressed as the papers say."""
    alone, ranks = build(single_device(scenario), Timeline(0, CPU), CPU), scenario.ranks
    parameters: dict[str, Any] = dict(alone.module.named_parameters())
    kind = scenario.policies.compressor or ""
    errors: list[Gradients] = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(ranks)]
    factors: Gradients = {}
    for step in range(STEPS):
        gradients: list[Gradients] = []
        for rank in range(ranks):
            inputs, targets, weights = Feed(scenario, rank, CPU).at(step)
            loss = loss_of(logits_of(alone.module(inputs)), targets) * (ranks * weights.ranks[rank])
            own = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(dict(zip(parameters, own, strict=True)))
        means = {name: sum(each[name] for each in gradients) / ranks for name in parameters}
        start = getattr(scenario.plan, kind).start_step
        for names, draws in buckets.values() if step >= start else ():
            totals = [{name: g[name] + e[name] for name in names} for g, e in zip(gradients, errors, strict=True)]
            if kind == "powersgd":
                drawn = draws[0 if scenario.plan.powersgd.warm_start else step - start]
                means |= low_rank_mean(scenario.plan.powersgd, totals, errors, factors, drawn)
            else:
                means |= mean_of_largest(scenario.plan.topk, totals, errors)
        for name, parameter in parameters.items():
            parameter.grad = means[name]
        alone.optimizer.step()
    return full_parameters(alone.module)


def low_rank_mean(
    options: PowerSGD, totals: list[Gradients], errors: list[Gradients], factors: Gradients, drawn: Tensor
) -> Gradients:
    """Return the mean of matrices as PowerSGD sends it, and update errors and factors."""
    means: Gradients = {}
    for name, total in totals[0].items():
        rows, columns = total.shape[0], total[0].numel()
        rank = min(rows, columns, options.rank)
        if not (rows + columns) * rank * options.min_compression_ratio < rows * columns:
            continue
        if name not in factors or not options.warm_start:
            factors[name] = drawn[: columns * rank].view(columns, rank)
        drawn = drawn[columns * rank :]
        matrices = [each[name].view(rows, columns) for each in totals]
        right = torch.linalg.qr(factors[name])[0]
        left = torch.linalg.qr(sum(matrix @ right for matrix in matrices))[0]
        factors[name] = sum(matrix.T @ left for matrix in matrices) / len(totals)
        means[name] = (left @ factors[name].T).view_as(total)
        for error, own in zip(errors, totals, strict=True):
            error[name] = options.error_feedback * (own[name] - means[name])
    return means


def mean_of_largest(options: TopK, totals: list[Gradients], errors: list[Gradients]) -> Gradients:
    """Return the mean of every rank's largest gradients of a bucket, and update errors."""
    flat = [torch.cat([total.view(-1) for total in own.values()]) for own in totals]
    count = max(1, round(options.density_ratio * flat[0].numel()))
    kept = [total * (total.abs() >= total.abs().sort().values[-count]) for total in flat]
    for error, total, sent in zip(errors, flat, kept, strict=True):
        error |= _like(totals[0], options.error_feedback * (total - sent))
    return _like(totals[0], sum(kept) / len(kept))


def _like(tensors: Gradients, flat: Any) -> Gradients:
    parts = flat.split([each.numel() for each in tensors.values()])
    return {name: part.view_as(tensors[name]) for name, part in zip(tensors, parts, strict=True)}


def _by_torch(scenario: Scenario, buckets: Buckets) -> dict[str, Tensor]:
    """Return the parameters after the same training with torch's powerSGD_hook, awaited in each bucket."""
    shapes = {
        name: p.shape for name, p in build(single_device(scenario), Timeline(0, CPU), CPU).module.named_parameters()
    }
    options = scenario.plan.powersgd
    state = PowerSGDState(
        None,
        matrix_approximation_rank=options.rank,
        start_powerSGD_iter=options.start_step,
        min_compression_rate=options.min_compression_ratio,
        use_error_feedback=options.error_feedback,
    )
    for index, (
        names,
        draws,
    ) in buckets.items():  # the same factors at first; torch groups them by the matrices' shapes
        matrices = {name: matrix for name in names if (matrix := low_rank_of(options, shapes[name]))}
        drawn = draws[0].split([columns * rank for _, columns, rank in matrices.values()])
        order = list(dict.fromkeys(matrices.values()))
        pairs = sorted(zip(matrices.values(), drawn, strict=True), key=lambda pair: order.index(pair[0]))
        state.p_memory_dict[index] = torch.empty(sum(rows * rank for (rows, _, rank), _ in pairs), dtype=torch.float64)
        state.q_memory_dict[index] = torch.cat([factor for _, factor in pairs])

    # DDP reads these annotations
    def awaited(_self: Any, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        future = powerSGD_hook(state, bucket)
        future.wait()  # its callbacks wait in gloo's threads: one bucket at a time
        return future

    hook = Compressor.hook
    Compressor.hook = awaited  # type: ignore[method-assign]
    try:
        training, feed = build(scenario, Timeline(dist.get_rank(), CPU), CPU), Feed(scenario, dist.get_rank(), CPU)
        for step in range(STEPS):
            training.step(*feed.at(step), dist.get_rank())
    finally:
        Compressor.hook = hook  # type: ignore[method-assign]
    return full_parameters(training.module)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
