"""Sparsity: the density of a threshold, from measured gradient statistics."""

from gssim.sparsity.density import (
    Ranges,
    Ratios,
    moment_of,
    movements,
    publish_density,
    publish_ratios,
    push_density,
    push_ratios,
    staleness_steps,
    traces_of,
    united,
)
