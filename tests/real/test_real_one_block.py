"""A model of one block, whose parameters FSDP2 gathers and reduces all at once: the peaks are those predicted."""

from pathlib import Path

import pytest
from real_runs import ADAMW64, HELPERS, SGD, TrainsAsOneDevice, in_groups, scenario_file, star

from gssim.errors import UserError
from gssim.scenario import load_scenario

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

MODEL = f"workload.model={HELPERS}/models/of_tests/one-block-gpt.toml"
USUAL = [MODEL, "workload.sequence_length=9", "workload.global_batch_size=6"]
TWO = {
    "zero3-sgd": [*SGD, "plan.method=zero3"],
    "zero2-momentum-of-0-sgd": [*SGD, "workload.momentum=0", "plan.method=zero2"],
    "zero2-twice-adamw": [*ADAMW64, "plan.method=zero2", "plan.micro_batches=3"],
}


def case_of(ranks: int, _name: str, changes: list[str], _folder: Path) -> dict:
    return {"scenario": scenario_file("small-demo.toml"), "overrides": [star(ranks), *USUAL, *changes]}


world = in_groups({2: TWO}, {2: list(TWO)}, case_of)


class TestOneBlock(TrainsAsOneDevice):
    """In its unit the last gradient, of the output layer, is a third of all: it lives until the reduction ends."""


def test_it_cannot_be_cut_however_it_is_traced() -> None:
    with pytest.raises(UserError, match=r"plan.tp = 2: 'one-block-gpt' has no blocks that could be cut") as error:
        load_scenario(Path(scenario_file("demo.toml")), [star(2), *USUAL, "plan.method=tensor"])
    assert "trace it again" not in str(error.value)
