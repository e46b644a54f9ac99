"""FSDP2's units: parameters gathered, gradients reduce-scattered."""

import math
from dataclasses import dataclass

from gssim import collectives, costs
from gssim.collectives import Communication
from gssim.memory import (
    Event,
    footprint,
)
from gssim.program.compute import backward_label, insert_after
from gssim.program.lowering import Lowering
from gssim.program.task import Task
from gssim.workload import LayerInstance, Parameter


@dataclass(frozen=True)
class Unit:
    """Layers that FSDP2 shards together: a block, or all that is no block (the root)."""

    name: str
    layers: tuple[LayerInstance, ...]
    ranks: int
    value_bytes: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the unit."""
        return tuple(parameter for instance in self.layers for parameter in instance.layer.parameters)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters: each padded in its first dimension to a multiple of the ranks."""
        return self.ranks * sum(self.shard_elements) * self.value_bytes

    @property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included (torch.chunk on dim 0)."""
        found = []
        for parameter in self.parameters:
            rows = parameter.shape[0] if parameter.shape else 1
            found.append(math.ceil(rows / self.ranks) * (parameter.elements // rows))
        return tuple(found)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return sum(parameter.elements for parameter in self.parameters) * self.value_bytes

    def own_elements(self, rank: int) -> tuple[int, ...]:
        """Return elements of each parameter on `rank`, padding left out."""
        found = []
        for parameter in self.parameters:
            rows = parameter.shape[0] if parameter.shape else 1
            chunk = math.ceil(rows / self.ranks)
            held = max(0, min(chunk, rows - rank * chunk))
            found.append(held * (parameter.elements // rows))
        return tuple(found)


def units(low: Lowering) -> tuple[Unit, ...]:
    """Return FSDP2's units in the order in which they are gathered: the root first, then each block."""
    blocks = [instance for instance in low.layers if instance.layer.block]
    root = tuple(instance for instance in low.layers if not instance.layer.block)
    made = [("root", root), *((instance.module, (instance,)) for instance in blocks)]
    return tuple(
        Unit(name, layers, len(low.group), low.value_bytes)
        for name, layers in made
        if any(instance.layer.parameters for instance in layers)
    )


def reduce_scatter_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 on a unit's last gradient: parameters freed, gradients copied into one buffer, that reduce-scattered.

    The buffer of one unit is held until the next unit's backward is done (torch 2.13, comm_ctx.reduce_scatter_states).
    """
    device = low.device(rank)
    labels = [task.label for task in tasks]
    held = 0.0
    waiting = []
    for unit in sorted(units(low), key=lambda unit: -min(i.index for i in unit.layers) if unit.name != "root" else 1):
        name = f"reduce-scatter {unit.name}"
        communication = low.communications[name] = Communication("reduce-scatter", low.group, unit.padded_bytes)
        copy = Task(
            f"copy in {name}",
            "backward",
            duration_s=costs.sharded_unit_time_s(
                device, phase="b", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
            ),
            need=footprint(
                [
                    Event(0, -unit.padded_bytes, "gathered_parameters"),
                    Event(1, -held, "communication"),
                    Event(2, unit.padded_bytes, "communication"),
                    Event(3, -unit.gradient_bytes, "gradients"),
                    Event(4, unit.padded_bytes / unit.ranks, "gradients"),
                ]
            ),
        )
        need = footprint(_staging(low, communication, 0))
        new = [copy, Task(name, "exposed_communication", communication=name, need=need)]
        held = float(unit.padded_bytes)
        if unit.name == "root":
            waiting = new
            continue
        index = labels.index(backward_label(unit.layers[0], 0))
        insert_after(tasks, index, new)
        labels = [task.label for task in tasks]
    free = Task("backward callback", "backward", need=footprint([Event(0, -held, "communication")]))
    return [*tasks, *waiting, free]


def _staging(low: Lowering, communication: Communication, position: int) -> list[Event]:
    """Return what the backend holds while a collective runs, from `position` on."""
    size = collectives.staging_bytes(communication, low.scenario.cluster.backend)
    return [Event(position, size, "communication"), Event(position + 1, -size, "communication")]


def gather_parameters(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 with reshard_after_forward=False: each unit is gathered before its first forward and kept.

    A gather's flat buffer is held until the next unit's gather is done, or the forward is.
    """
    device = low.device(rank)
    held = 0.0
    for unit in units(low):
        name = f"all-gather {unit.name}"
        communication = low.communications[name] = Communication("all-gather", low.group, unit.padded_bytes)
        size = float(unit.padded_bytes)
        need = footprint([Event(0, size, "communication"), *_staging(low, communication, 1)])
        new = [
            Task(name, "exposed_communication", communication=name, need=need),
            Task(
                f"copy out {name}",
                "forward",
                duration_s=costs.sharded_unit_time_s(
                    device, phase="f", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
                ),
                need=footprint([Event(0, -held, "communication"), Event(1, size, "gathered_parameters")]),
            ),
        ]
        held = size
        first = low.layers[0] if unit.name == "root" else unit.layers[0]
        index = next(i for i, task in enumerate(tasks) if task.label == f"forward {first.module}")
        tasks[index:index] = new
    end = next(i for i, task in enumerate(tasks) if task.label == f"forward {low.layers[-1].module}")
    tasks[end:end] = [Task("forward end", "forward", need=footprint([Event(0, -held, "communication")]))]
    return tasks
