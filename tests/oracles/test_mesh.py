"""Coordinates of ranks in the mesh, and the groups along each axis; torch's device mesh is the oracle."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.plan import Mesh
from gssim.plan.mesh import AXES

meshes = st.builds(Mesh, **{name: st.integers(1, 4) for name in AXES})


@given(meshes, st.data())
def test_a_rank_is_numbered_by_its_coordinates(mesh: Mesh, data: st.DataObject):
    rank = data.draw(st.integers(0, mesh.ranks - 1))
    place, number = mesh.place(rank), 0
    for name, size in zip(AXES, mesh.sizes, strict=True):
        number = number * size + getattr(place, name)
    assert number == rank


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_of_axes_divide_the_ranks(mesh: Mesh, axes: set[str]):
    groups = {tuple(mesh.group(rank, *axes)) for rank in range(mesh.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
    for group in groups:
        assert list(group) == sorted(group)
        fixed = [name for name in AXES if name not in axes]
        assert len({tuple(getattr(mesh.place(rank), name) for name in fixed) for rank in group}) == 1


@given(meshes)
def test_ranks_of_one_replica_take_the_same_part_of_the_batch(mesh: Mesh):
    for rank in range(mesh.ranks):
        replica = mesh.group(rank, "pp", "tp")
        assert {mesh.data_rank(other) for other in replica} == {mesh.data_rank(rank)}
    assert {mesh.data_rank(rank) for rank in range(mesh.ranks)} == set(range(mesh.data_ranks))


def test_torch_numbers_ranks_alike():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)
    numbers = torch.arange(mesh.ranks).view(mesh.sizes)
    for coordinates in product(*(range(size) for size in mesh.sizes)):
        rank = int(numbers[coordinates])
        place = mesh.place(rank)
        assert tuple(getattr(place, name) for name in AXES) == coordinates
        pp, dp_replicate, dp_shard, cp, tp = coordinates
        assert list(mesh.group(rank, "tp")) == numbers[pp, dp_replicate, dp_shard, cp, :].tolist()
        assert list(mesh.group(rank, "cp")) == numbers[pp, dp_replicate, dp_shard, :, tp].tolist()
        data_group = numbers[pp, :, :, cp, tp].reshape(-1).tolist()
        assert list(mesh.group(rank, "dp_replicate", "dp_shard")) == data_group
