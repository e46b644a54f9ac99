"""Lowers scenarios to programs: the typed task graph of a training step, with the tasks of every rank."""

from gssim.program.kernel_workspace import unmeasured_workspace
from gssim.program.lowering import Lowering
from gssim.program.optimizer import workspaces
from gssim.program.passes import Steps, StepTraffic, lower, lowering_key
from gssim.program.periodic import after_inner_steps
from gssim.program.sharded import Tensors, units
from gssim.program.task import (
    Awaited,
    Chunk,
    Issue,
    MessageName,
    Name,
    Outline,
    Part,
    Parts,
    Posted,
    Program,
    Route,
    Task,
    TaskId,
    Template,
    distinct_tasks,
    name_of,
    needs_of,
    parts_of,
    template_tasks,
    without_messages,
)
from gssim.program.tensor_slices import unmeasured_host_time
from gssim.program.text import program_table, program_text, read_tasks
