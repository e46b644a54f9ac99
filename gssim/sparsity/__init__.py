"""Sparsity: the density of a threshold, from measured gradient statistics."""

from gssim.sparsity.density import (
    Ranges,
    Ratios,
    moment_of,
    movements,
    publish_ratios,
    push_ratios,
    staleness_steps,
    traces_of,
)
