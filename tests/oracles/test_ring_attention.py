"""Attention around a ring gives torch's attention, in memory that the module's variables do not keep."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from torch.nn import functional as F

from gsreal.methods import ring_attention
from gsreal.methods.ring_attention import Ring, attend_in_ring


def no_shift(sent, received, tag):
    """Fail: one rank has no neighbour to send keys and values to."""
    raise AssertionError(tag)


@pytest.mark.parametrize("trained", [False, True])
def test_the_linear_map_after_a_ring_needs_no_copy_of_the_output(monkeypatch, trained):
    """A module whose variable held the attention's own output beside that copy held one tensor more in a block without
    a backward: 18 kB of 891 with tensor parallelism and divided sequences."""
    rings = []
    monkeypatch.setattr(ring_attention, "_RINGS", rings)
    rings.append(Ring(1, 0, zigzag=False, overlaps=True, shift=no_shift, gather=None, number=0))
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    with torch.set_grad_enabled(trained):
        found = attend_in_ring(rings[0], query, key, value, is_causal=True)
    assert torch.allclose(found, F.scaled_dot_product_attention(query, key, value, is_causal=True), atol=1e-6)
    rows = found.transpose(1, 2).reshape(2, 5, 12)
    assert rows.data_ptr() == found.data_ptr()
