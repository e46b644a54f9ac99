"""Evaluation of a model during a run, on held-out data."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.data import sources as data
from gsreal.model_files.build import DTYPES, logits_of, loss_of
from gsreal.run.progress import note_progress
from gssim.errors import UserError
from gssim.plan import splitting
from gssim.result import Evaluation
from gssim.scenario import Scenario


def check_evaluation(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if a run asks for an evaluation that is impossible; `where` names the file."""
    if scenario.run.evaluate_every_steps is None:
        return
    if scenario.policies.pp > 1:
        raise UserError(
            f"{where}: run.evaluate_every_steps = {scenario.run.evaluate_every_steps}: no rank of a pipeline has the "
            "whole model, and its schedule only trains; leave it out"
        )
    data.check_held_out(scenario.workload, where=where)


class HeldOut:
    """This rank's part of the held-out data, in equally many forwards on every rank: FSDP2's are collectives."""

    def __init__(self, scenario: Scenario, rank: int, device: torch.device) -> None:
        self.device, self.precision = device, DTYPES[scenario.workload.precision]
        self.classifies = getattr(scenario.workload.model.input, "classes", None) is not None
        self.source, samples = data.open_held_out(scenario.workload)
        policies, sizes = scenario.policies, scenario.data_batch_sizes
        # no larger than in training, so that memory that was enough stays enough
        most = max(1, max(sizes) // scenario.plan.micro_batches)
        parts = splitting.split(samples, splitting.even(len(sizes)))
        start = sum(parts[: policies.data_rank(rank)])
        forwards = -(-max(parts) // most)
        self.sizes = splitting.split(parts[policies.data_rank(rank)], splitting.even(forwards))
        self.start = start

    def evaluate(self, module: nn.Module, *, step: int) -> Evaluation:
        """Return loss and accuracy on all held-out data, without side effects on the training (a collective)."""
        module.eval()
        with torch.no_grad():
            sums = torch.stack([self._sums(module, *batch) for batch in self._batches()]).sum(0)
        module.train()
        _free_gathered(module)
        dist.all_reduce(sums)  # ranks with the same part of the data count it equally: means do not change
        loss, targets, right, samples = sums.tolist()
        return Evaluation(step=step, loss=loss / targets, accuracy_ratio=right / samples if self.classifies else None)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = self.start
        for size in self.sizes:
            note_progress("it evaluates")
            inputs, targets = self.source.batch(seed=0, step=0, rows=slice(start, start + size))
            inputs = inputs.to(self.precision) if inputs.is_floating_point() else inputs
            yield inputs.to(self.device), targets.to(self.device)
            start += size

    def _sums(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of losses, their number, the number of correctly classified samples, and of all samples."""
        logits = logits_of(module(inputs))
        terms = data.loss_terms(targets)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = float(loss_of(logits, targets)) * terms if terms else 0.0
        right = int((logits.argmax(-1) == targets).sum()) if self.classifies else 0
        return torch.tensor([loss, terms, right, len(targets)], dtype=torch.float64, device=self.device)


def _free_gathered(module: nn.Module) -> None:
    """Free parameters that FSDP2 keeps gathered for a backward: the next step gathers them as usual."""
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
