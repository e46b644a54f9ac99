"""Real data that every machine has: the Python standard library's own source, and scikit-learn's digits.

Every rank can make the whole step's batch from (seed, step) and takes its own rows, so no rank talks about data.
"""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gssim.units import UserError
from gssim.workload import Model, TokenInput, Workload

IGNORED = -100
"""Target that the loss leaves out (torch's cross_entropy default)."""
MASKED_RATIO = 0.15
"""BERT's fraction of masked tokens (Devlin et al. 2018, section 3.1)."""


@cache
def standard_library_bytes() -> np.ndarray:
    """Return the source of the standard library's top-level modules, concatenated by file name, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), dtype=np.uint8)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (1797, 1, 8, 8) in 0..1 and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[:, None] / 16.0).astype(np.float32), found.target.astype(np.int64)


def check_data(workload: Workload, *, where: str) -> None:
    """Raise UserError where the model cannot be trained on the data that there is."""
    source = workload.model.input
    if isinstance(source, TokenInput):
        needed = 257 if source.task == "masked-token" else 256
        if workload.data == "digits" or source.vocabulary < needed:
            raise UserError(
                f"{where}: workload.data: a model of {source.vocabulary} tokens cannot read '{workload.data}'; "
                f"bytes need a vocabulary of {needed}"
            )
    elif workload.data == "stdlib-bytes" or source.shape != (1, 8, 8) or source.classes < 10:
        raise UserError(f"{where}: workload.data: the digits are images of 1x8x8 in 10 classes, the model takes others")


def global_batch(workload: Workload, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the whole step's batch, the same on every rank."""
    random = np.random.default_rng([seed, step])
    if isinstance(workload.model.input, TokenInput):
        return _token_batch(workload, random)
    images, classes = digits()
    rows = random.integers(0, len(images), workload.global_batch_size)
    return torch.from_numpy(images[rows]), torch.from_numpy(classes[rows])


def _token_batch(workload: Workload, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    corpus, length = standard_library_bytes(), workload.sequence_length or 1
    starts = random.integers(0, len(corpus) - length - 1, workload.global_batch_size)
    windows = corpus[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    assert isinstance(workload.model.input, TokenInput)
    if workload.model.input.task == "next-token":
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
    tokens = windows[:, :-1]
    masked = random.random(tokens.shape) < MASKED_RATIO
    masked[:, 0] = True  # every sample has a loss term
    inputs = np.where(masked, workload.model.input.vocabulary - 1, tokens)
    return torch.from_numpy(inputs), torch.from_numpy(np.where(masked, tokens, IGNORED))


def loss_terms(targets: Tensor) -> int:
    """Return over how many targets the loss is a mean."""
    return int((targets != IGNORED).sum())


def takes_data(model: Model) -> str:
    """Return the name of the data that `auto` stands for."""
    return "stdlib-bytes" if isinstance(model.input, TokenInput) else "digits"
