"""Programs: the tasks of every rank in a step, lowered from a scenario in passes."""

from gssim.program.lowering import Lowering
from gssim.program.optimizer import workspaces
from gssim.program.owned import owned_layers
from gssim.program.passes import Sent, Steps, lower, what_lowering_reads
from gssim.program.sharded import Tensors, units
from gssim.program.task import Issue, MicroBatch, Program, Task
from gssim.program.tensor_slices import uncounted

__all__ = [
    "Issue",
    "Lowering",
    "MicroBatch",
    "Program",
    "Sent",
    "Steps",
    "Task",
    "Tensors",
    "lower",
    "owned_layers",
    "uncounted",
    "units",
    "what_lowering_reads",
    "workspaces",
]
