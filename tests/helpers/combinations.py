"""Combinations of values that a test is given, few of which are quick."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def each_once(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations as a test's parameters; all but a few, which hold every value once, are marked slow."""
    few = {tuple(place % len(each) for each in values) for place in range(max(map(len, values)))}
    return [
        pytest.param(
            *(each[place] for each, place in zip(values, places, strict=True)),
            marks=[] if places in few else pytest.mark.slow,
        )
        for places in product(*(range(len(each)) for each in values))
    ]
