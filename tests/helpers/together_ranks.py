"""Runs on every rank of a test: real trainings, beside the same with all ranks in one process.

Arguments: a JSON file of cases {name: {"scenario": FILE, "overrides": [...]}} and the file to write.
"""

import sys

import torch.distributed as dist
from rank_training import from_all_ranks, full_parameters, largest_difference, scenarios_in, trained, write_found

from gsreal.run.rank import run_on_rank
from gsreal.statistics.together import Apart, trainer_of

STEPS, STEPS_OF_PERIODS = 4, 7
"""Steps of a training; the second number: of ranks that synchronize every third or fourth step, and then train on."""


def main(cases_file: str, out: str) -> None:
    found = {}
    for name, scenario in scenarios_in(cases_file):
        rank = dist.get_rank()
        steps = STEPS if scenario.policies.sync_every_steps is None else STEPS_OF_PERIODS
        real = trained(scenario, rank, steps=steps)
        trainer = trainer_of(scenario)
        start = full_parameters(trainer.modules[rank] if isinstance(trainer, Apart) else trainer.module)
        start = {key: value.detach().clone() for key, value in start.items()}
        for step in range(steps):
            trainer.train(step)
        module = trainer.modules[rank] if isinstance(trainer, Apart) else trainer.module
        together = full_parameters(module)
        every = from_all_ranks((largest_difference(real, together), largest_difference(start, together)))
        found[name] = {"differences": [each for each, _ in every], "moved": min(each for _, each in every)}
    write_found(found, out)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
