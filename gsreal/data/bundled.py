"""Real data that every machine has: the Python standard library's own source, and scikit-learn's digits."""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gsreal.data.source import sizes_of
from gsreal.data.tokenisers import START


@cache
def standard_library_files() -> tuple[np.ndarray, ...]:
    """Return the source of each of the standard library's top-level modules, by file name, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return tuple(np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in sorted(folder.glob("*.py")))


@cache
def standard_library_bytes() -> np.ndarray:
    """Return the source of the standard library's top-level modules, concatenated by file name, as uint8."""
    return np.concatenate(standard_library_files())


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (1797, 1, 8, 8) in 0..1 and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[:, None] / 16.0).astype(np.float32), found.target.astype(np.int64)


@dataclass(frozen=True)
class Digits:
    """Images of digits, drawn one by one."""

    batch_size: int

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return images and classes of these rows."""
        images, classes = digits()
        drawn = np.random.default_rng([seed, step]).integers(0, len(images), self.batch_size)[rows]
        return torch.from_numpy(images[drawn]), torch.from_numpy(classes[drawn])

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return how many images each part has."""
        return sizes_of(rows)


@dataclass(frozen=True)
class WhichModule:
    """Pieces of the standard library's longest modules, to be classified by the module that they are from."""

    length: int
    classes: int
    batch_size: int

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids (a start, then bytes) and the modules of these rows; no class is likelier than another."""
        modules = longest_modules(self.classes)
        random = np.random.default_rng([seed, step])
        classes = random.integers(0, self.classes, self.batch_size)
        room = np.array([len(module) for module in modules])[classes] - (self.length - 1)
        starts = random.integers(0, room + 1)
        tokens = np.full((len(classes[rows]), self.length), START, dtype=np.int64)
        for row, (module, start) in enumerate(zip(classes[rows], starts[rows], strict=True)):
            tokens[row, 1:] = modules[module][start : start + self.length - 1]
        return torch.from_numpy(tokens), torch.from_numpy(classes[rows])

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return how many pieces each part has."""
        return sizes_of(rows)


def longest_modules(count: int) -> list[np.ndarray]:
    """Return the longest of the standard library's top-level modules, longest first."""
    return sorted(standard_library_files(), key=len, reverse=True)[:count]
