"""The loss of divided logits against torch's cross-entropy: values and gradients, with masked targets."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch

from gsreal.methods.vocabulary_parallel import IGNORED, divided_loss


@pytest.mark.parametrize(("kind", "tolerance"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 1e-2)])
def test_one_rank_has_torchs_loss_and_gradient(kind, tolerance):
    torch.manual_seed(0)
    logits = (5 * torch.randn(3, 7, 11, dtype=torch.float64)).to(getattr(torch, kind))
    targets = torch.randint(0, 11, (3, 7))
    targets[0, :4] = IGNORED
    found, wanted = (logits.clone().requires_grad_() for _ in range(2))
    loss = divided_loss(0, lambda tensor, op: None, found * 1, targets)
    expected = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten())
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=tolerance, atol=tolerance)
