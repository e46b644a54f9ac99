"""Elements of a cut tensor that each rank holds, and their places in the whole: together ranks hold it once."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from hypothesis import given
from hypothesis import strategies as st

from gsreal.gradient_sharding.master import MasterCopy
from gsreal.gradient_sharding.state import PartialTensor
from gsreal.methods.pipelined import StageModules
from gsreal.methods.tensor_slices import Slice
from gsreal.run.checkpoint import Elements, _pieces


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    parts=st.integers(1, 3),
    dimension=st.integers(0, 1),
    chunks=st.integers(1, 4),
)
def test_pieces_of_all_ranks_are_the_whole(sizes, parts, dimension, chunks):
    """Units of several tensors side by side go to the ranks of a group; rows of what these hold to those that shard."""
    units, other = sum(sizes), 5
    each = 2 * units  # elements of one of the tensors side by side, two for a unit
    shape = [parts * each, other] if dimension == 0 else [other, parts * each]
    whole, found = torch.arange(parts * each * other).reshape(shape), torch.full(shape, -1)
    for rank, held in enumerate(sizes):
        first = sum(sizes[:rank])
        ranges = tuple((part * each + 2 * first, part * each + 2 * (first + held)) for part in range(parts))
        part = Slice(dimension, parts * each, ranges)
        rows = part.of(whole)
        row = 0
        for chunk in rows.chunk(chunks) if len(rows) else [rows]:
            for where, piece in _pieces(chunk, part, row).items():
                place = found[tuple(slice(start, start + size) for start, size in zip(where, piece.shape, strict=True))]
                assert (place == -1).all()
                place.copy_(piece)
            row += len(chunk)
    assert torch.equal(found, whole)


def test_stages_have_the_names_of_the_model_and_states_are_by_key():
    whole = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    last = torch.nn.Sequential(torch.nn.Identity(), whole[1], whole[2])
    stages = StageModules([last], None)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
    found = Elements(stages, optimizer).state_dict()
    assert set(found["model"]) == set(last.state_dict())
    assert set(found["optimizer"]) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(found["optimizer"]["2.bias"]) == {"momentum_buffer"}
    found["model"]["2.weight"].fill_(7.0)
    assert (whole[2].weight == 7).all()


def test_a_master_copy_is_part_of_the_state():
    module = torch.nn.Linear(3, 2).bfloat16()
    optimizer = MasterCopy(module.parameters(), torch.optim.AdamW, lr=0.1)
    before = module.weight.detach().clone()
    found = Elements(module, optimizer).state_dict()["optimizer"]
    assert set(found["weight"]) == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert found["weight"]["master"].dtype == torch.float32
    assert found["weight"]["step"] == 0
    assert torch.equal(module.weight, before)


def test_nobody_computes_on_a_part():
    part = PartialTensor({(2,): torch.ones(3)}, (10,))
    assert part.shape == (10,)
    assert "(3,) at (2,) of (10,)" in repr(part)
    with pytest.raises(NotImplementedError):
        part + 1
