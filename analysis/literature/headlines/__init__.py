"""Checks of the headline figures in the project's two starting texts: are they physically consistent?

`Optimizing Deep Learning Training Through Gradient Sharding` states a table of memory, time and accuracy; `Efficient
distributed training in deep learning` states the training cost of some models.
"""

from pathlib import Path

from analysis.literature.headlines import efficient_training, table1
from analysis.literature.headlines.headline import Headline, Simulations

__all__ = ["Headline", "all_headlines"]


def all_headlines(scenarios: Path, *, slow: bool = False) -> list[Headline]:
    """Return a check of every figure, simulated with the scenarios of that folder; UserError where one is missing.

    `slow`: include those that take minutes.
    """
    simulations = Simulations(scenarios)
    texts = (table1, efficient_training)
    headlines = [headline for text in texts for headline in text.headlines(simulations)]
    return headlines + (efficient_training.slow_headlines() if slow else [])
