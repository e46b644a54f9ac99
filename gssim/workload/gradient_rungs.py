"""Rungs of a family's ladder: gradient statistics of one measured model, summarized by the role of its tensors.

A ladder has rungs of several sizes, from which a family predicts models of other sizes (`gradient_family`). A rung
holds, for each role, the scales of the gradients and the shape of their distribution.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gssim.units import Floats
from gssim.workload.gradient_family import (
    ADAPTIVE,
    CHANGES,
    LEVELS,
    SHAPE_EDGES,
    TRIED,
    WINDOWS,
    RoleShape,
    Rung,
    reaching,
    rounded,
    tail_at,
)
from gssim.workload.gradient_statistics import SKETCH_EDGES, BlockTrace, GradientStatistics, RankTrace, Sketch
from gssim.workload.model import Model, TokenInput, unrolled

# Roles of tensors -----------------------------------------------------------------------------------------------------

ROLES: tuple[tuple[str, str], ...] = (
    (r"norm|\bln_|\bln\b|(^|\.)ln", "norm"),
    (r"position|wpe|token_type", "positions"),
    (r"word_embed|embed_tokens|embed_in|wte|^tokens|\.tokens|embed_out.weight", "tokens"),
    (r"qkv|c_attn|query_key_value", "qkv"),
    (r"(attn|attention).*(\bq|query)|q_proj", "q"),
    (r"(attn|attention).*(\bk|key)|k_proj", "k"),
    (r"(attn|attention).*(\bv|value)|v_proj", "v"),
    (r"(attn|attention).*(out|c_proj|o_proj|dense|proj)|o_proj", "out"),
    (r"gate_up|gate_proj|router|gate\b", "gate"),
    (r"up\b|_up\b|up_proj|c_fc|intermediate|fc1|fc_in|h_to_4h", "up"),
    (r"down|c_proj|output\.dense|fc2|fc_out|4h_to_h", "down"),
    (r"shortcut|downsample", "shortcut"),
    (r"stem|embedder", "stem"),
    (r"head|classifier|predictions\.decoder|predictions\.bias|score|\bfc\b", "head"),
    (r"conv|layer\.\d+\.", "convolution"),
)
"""Patterns of parameters' names with their roles, in the order in which they are tried."""
LIKE = {"gate": "up", "k": "q", "q": "out", "v": "out", "shortcut": "convolution", "stem": "convolution", "up": "out"}
"""For roles that a family lacks, the role that is used instead."""


def role_of(name: str, shape: Sequence[int]) -> str:
    """Return the role of a parameter from its name and shape; biases have roles of their own.

    >>> role_of("transformer.h.3.attn.c_attn.weight", (768, 2304)), role_of("layers.0.mlp.down_proj.weight", (8, 4))
    ('qkv', 'down')
    >>> role_of("blocks.0.up.bias", (64,)), role_of("blocks.1.norm1.weight", (64,))
    ('up.bias', 'norm.weight')
    """
    text = name.lower()
    role = next((role for pattern, role in ROLES if re.search(pattern, text)), "out")
    if role == "norm":
        return f"norm.{'bias' if text.endswith('bias') else 'weight'}"
    return f"{role}.bias" if len(shape) < 2 and text.endswith("bias") else role


@dataclass(frozen=True)
class Placed:
    """One parameter of a model: its role, its place in depth, and its shape."""

    name: str
    role: str
    place: str
    """`first`, `inner` or `last` block; `before` or `after` the blocks."""
    shape: tuple[int, ...]
    share: float = 1.0
    """Fraction of the tokens that reach the parameter; below 1 for a routed expert."""

    @property
    def key(self) -> str:
        """Key of the parameter's statistics in a family."""
        return f"{self.place}/{self.role}"


def placed(model: Model) -> tuple[Placed, ...]:
    """Return the parameters of a model with their roles."""
    layers = unrolled(model)
    blocks = [instance.index for instance in layers if instance.layer.block]
    tensors = []
    chosen = next((layer.experts_per_token for layer in model.expert_layers if layer.experts_per_token), 2)
    for instance in layers:
        if not blocks or instance.index < blocks[0]:
            place = "before"
        elif instance.index > blocks[-1]:
            place = "after"
        else:
            at = blocks.index(instance.index) if instance.index in blocks else 0
            place = "first" if at == 0 else "last" if at == len(blocks) - 1 else "inner"
        for name, parameter in zip(instance.parameter_names, instance.layer.parameters, strict=True):
            expert = "expert" in name and "shared" not in name and len(parameter.shape) == 3
            share = min(1.0, chosen / parameter.shape[0]) if expert else 1.0
            tensors.append(Placed(name, role_of(name, parameter.shape), place, parameter.shape, share))
    names = {each.role for each in tensors}
    if "head" not in names or not any(each.role == "head" and len(each.shape) > 1 for each in tensors):
        tensors = [replace(each, role="tied") if each.role == "tokens" else each for each in tensors]
    return tuple(tensors)


def sizes_of(model: Model) -> tuple[int, int]:
    """Return the width of a model (of its embedding, or of its first convolution) and its number of blocks."""
    layers = unrolled(model)
    shapes = [parameter.shape for instance in layers for parameter in instance.layer.parameters if parameter.shape]
    width = shapes[0][1] if isinstance(model.input, TokenInput) and len(shapes[0]) > 1 else shapes[0][0]
    return width, max(1, sum(instance.layer.block for instance in layers))


def family_of(model: Model) -> str:
    """Return the name of the family whose ladder is nearest to a model."""
    if not isinstance(model.input, TokenInput):
        return "resnet"
    if model.input.task != "next-token":
        return "bert"
    names = [name for instance in unrolled(model) for name in instance.parameter_names]
    return "llama" if any("gate_proj" in name for name in names) else "gpt"


# From measured statistics to a rung -----------------------------------------------------------------------------------

THIRDS = ("q", "k", "v")


def _sketch_tail(sketch: Sketch, at: Floats) -> Floats:
    edges = SKETCH_EDGES[sketch.first_edge : sketch.first_edge + len(sketch.tail_ratios) + 1]
    return tail_at(edges, (*sketch.tail_ratios, 0.0)[: len(edges)], at)


@dataclass(frozen=True)
class _Part:
    """A block of a tensor."""

    block: BlockTrace
    correlations: tuple[float, ...]
    elements: float
    tensor: str


def _parts_by_key(trace: RankTrace, parameters: Sequence[Placed]) -> dict[str, list[_Part]]:
    """Return the blocks of tensors by role; a fused query-key-value tensor counts both as a whole and by its thirds."""
    by_key: dict[str, list[_Part]] = {}
    for parameter in parameters:
        tensor = trace.tensors[parameter.name]
        size = math.prod(parameter.shape) / len(tensor.blocks)
        for number, block in enumerate(tensor.blocks):
            part = _Part(block, tensor.correlations, size, parameter.name)
            thirds = THIRDS if len(tensor.blocks) % 3 else (THIRDS[number * 3 // len(tensor.blocks)],)
            for role in (parameter.role, *(thirds if parameter.role == "qkv" else ())):
                by_key.setdefault(f"{parameter.place}/{role}", []).append(part)
    return by_key


def rung_of(
    statistics: GradientStatistics,
    parameters: Sequence[Placed],
    *,
    name: str,
    width: int,
    layers: int,
    held_back: bool = False,
    shape_steps: Sequence[int] = (),
) -> Rung:
    """Return a rung from statistics of dense training, with shapes at those of `shape_steps` that were sampled."""
    trace = next(trace for trace in statistics.traces if not trace.threshold)
    elements: dict[str, int] = {}
    for parameter in parameters:
        roles = THIRDS if parameter.role == "qkv" else (parameter.role,)
        for role in roles:
            key, count = f"{parameter.place}/{role}", math.prod(parameter.shape) // len(roles)
            elements[key] = elements.get(key, 0) + count
    common, deviation, shapes = {}, {}, {}
    for key, parts in _parts_by_key(trace, parameters).items():
        weights = np.array([part.elements for part in parts])
        squares = np.array([[sketch.rms**2 for sketch in part.block.sketches] for part in parts])
        alike = np.clip([part.correlations or [1.0] * squares.shape[1] for part in parts], 1e-3, 1.0)
        common[key] = rounded(np.average(squares * alike, axis=0, weights=weights))
        deviation[key] = rounded(np.average(squares * (1 - alike), axis=0, weights=weights) * trace.samples)
        if shape_steps:
            shapes[key] = _shape(statistics, parts, weights, np.sqrt(np.average(squares, 0, weights)), shape_steps)
    rung = Rung(
        name=name,
        held_back=held_back,
        width=width,
        layers=layers,
        elements=elements,
        thresholds={},
        samples=trace.samples,
        sequence_length=statistics.sequence_length,
        learning_rate=statistics.learning_rate,
        optimizer=statistics.optimizer,
        sampled_steps=statistics.sampled_steps,
        common=common,
        deviation=deviation,
        shapes=shapes,
    )
    reached: Floats = np.zeros((len(statistics.sampled_steps), len(TRIED)))
    for parameter in parameters:
        blocks = trace.tensors[parameter.name].blocks
        share = math.prod(parameter.shape) / len(blocks) / sum(math.prod(other.shape) for other in parameters)
        for block in blocks:
            reached += share * np.array([_sketch_tail(sketch, TRIED) for sketch in block.sketches])
    thresholds = {window: rounded(reaching(rung.weights(window) @ reached)) for window in WINDOWS}
    return replace(rung, thresholds=thresholds)


def _falling(values: Floats) -> tuple[float, ...]:
    """Return the ratios, made non-increasing and rounded to three digits."""
    return rounded(np.minimum.accumulate(np.clip(values, 0.0, 1.0)))


def _shape(
    statistics: GradientStatistics,
    parts: Sequence[_Part],
    weights: Floats,
    rms: Floats,
    shape_steps: Sequence[int],
) -> RoleShape:
    places = [statistics.sampled_steps.index(step) for step in shape_steps if step in statistics.sampled_steps]
    fields: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("tails", "growth", "changes")}
    fields |= {"relative": [], "relative_feedback": []}
    means = []
    for at in places:
        scale = max(float(rms[at]), 1e-30)
        edges = np.array(SHAPE_EDGES)
        tails = _falling(
            np.average([_sketch_tail(part.block.sketches[at], edges * scale) for part in parts], 0, weights)
        )
        fields["tails"].append(tails)
        means.append(float(np.average([part.block.sketches[at].mean for part in parts], weights=weights)) / scale)
        if statistics.feedback_thresholds:
            sent = np.average([part.block.feedback[at].sent_ratios for part in parts], 0, weights)
            fields["growth"].append(_growth(tails, np.array(statistics.feedback_thresholds) / scale, sent))
        if statistics.multiples:
            for field_name, kind in (("relative", "sent_ratios"), ("relative_feedback", "feedback_ratios")):
                rows = np.average([getattr(part.block.relative[at], kind) for part in parts], 0, weights)
                fields[field_name].append(_falling(rows))
        if statistics.changes:
            unit = change_unit(statistics.optimizer, statistics.learning_rate, scale)
            names = dict.fromkeys(part.tensor for part in parts)
            sent = np.mean([np.mean([row[at] for row in statistics.changes[name].blocks], 0) for name in names], 0)
            levels = np.array(statistics.publish_thresholds) / unit
            fields["changes"].append(_falling(tail_at((levels[0] / 1e3, *levels), (1.0, *sent), np.array(CHANGES))))
    return RoleShape(
        tails=tuple(fields["tails"]),
        mean_ratios=rounded(np.array(means)),
        growth=tuple(fields["growth"]),
        relative=tuple(fields["relative"]),
        relative_feedback=tuple(fields["relative_feedback"]),
        changes=tuple(fields["changes"]),
    )


def change_unit(optimizer: str, learning_rate: float, rms: float) -> float:
    """Return the scale of a parameter's change in one step; for an adaptive optimizer, the learning rate."""
    return learning_rate if optimizer in ADAPTIVE else learning_rate * max(rms, 1e-30)


def _growth(tails: Sequence[float], levels: Floats, sent: Floats) -> tuple[float, ...]:
    """Return, at each of `LEVELS`, the factor on the scale under which the tail has the density in `sent`."""
    scales = 10.0 ** (np.arange(-6, 25) / 12)  # factors of 0.3 to 100
    known_levels, known = [], []
    for level, ratio in zip(levels, sent, strict=True):
        if 0 < ratio < 0.98 * tails[0]:
            reached = tail_at(SHAPE_EDGES, tails, level / scales)
            known_levels.append(math.log(level))
            known.append(float(np.interp(ratio, reached, np.log(scales))))
    if not known:
        return (1.0,) * len(LEVELS)
    return rounded(np.exp(np.maximum(0.0, np.interp(np.log(LEVELS), known_levels, known))))
