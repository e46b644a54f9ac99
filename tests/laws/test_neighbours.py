"""Ranks whose thresholded messages are the same have one role: each does what it does lowered by itself."""

from pathlib import Path

import pytest

from gssim.program import Steps
from gssim.scenario import Loaded, load_scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SWITCH = (
    'cluster={{name="gpus", backend="nccl", source="made", device_types={{gpu="a100-sxm-80"}}, topology={{'
    'kind="switch", devices=[{{device="gpu", count={ranks}}}], devices_per_host={per_host}, '
    'link={{bandwidth_bytes_per_s="10 Gb/s", latency_s="10 us", source="made"}}}}}}'
)


def loaded(ranks: int, *changes: str, per_host: int = 1) -> Loaded:
    """Return demo's model on equal GPUs; of its sixteen samples the first sixteen ranks have one each."""
    switch = SWITCH.format(ranks=ranks, per_host=per_host)
    of_batch = "plan.shares.batch=throughput"
    return load_scenario(SCENARIOS / "demo.toml", [switch, of_batch, "plan.push.threshold=1e-3", *changes])


@pytest.mark.parametrize(
    ("changes", "per_host"),
    [
        ((), 1),
        (("plan.method=gs_z3",), 1),
        (("plan.publish.threshold=1e-3",), 1),
        (("plan.method=gs_hier",), 2),
        (("plan.push.aggregate=received-weight", "plan.push.error_feedback=true"), 1),
    ],
)
def test_neighbours_with_the_same_messages_have_one_role(changes, per_host):
    asked = loaded(128, *changes, per_host=per_host)
    together = Steps(asked.scenario, asked.gradients).program(10)
    alone = Steps(asked.scenario, asked.gradients, unfolded=True).program(10)
    assert len(alone.tasks) == 128
    assert len(together.tasks) < 115
    for rank, role in enumerate(together.role_of):
        assert together.tasks[role] == alone.tasks[rank]
        assert together.persistent[role] == alone.persistent[rank]
    assert together.push_density == alone.push_density


def test_what_a_step_sends_is_that_of_its_program():
    asked = loaded(64, "plan.publish.threshold=1e-3")
    steps = Steps(asked.scenario, asked.gradients)
    program, sent = steps.program(12), steps.traffic(12)
    named = {name: each.payload_bytes for name, each in program.communications.items() if each.data_dependent}
    assert named == {name: sent.payload_bytes[name] for name in named}
    assert sent.whole_bytes == pytest.approx(sum(named.values()), rel=1e-12)
    assert (sent.push_density, sent.publish_density) == (program.push_density, program.publish_density)
