"""Bundled real data: the Python standard library's own source, and scikit-learn's digits.

A part of each is held out: no training ever draws from it.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gsreal.data.source import sizes_of
from gsreal.data.text import START
from gssim.units import Ints

HELD_OUT_DIGITS = 540
"""Held-out digits: three in ten of 1797, of each class in proportion."""
HELD_OUT_RATIO = 0.1
"""Held-out part of the standard library's bytes (the last by file name), and of a module to be classified (its end)."""


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

    bunch = load_digits()
    return (bunch.images[:, None] / 16.0).astype(np.float32), bunch.target.astype(np.int64)


def trained_part(tokens: np.ndarray) -> np.ndarray:
    """Return the bytes for training: all but the last tenth."""
    return tokens[: len(tokens) - _held_out_bytes(tokens)]


def held_out_part(tokens: np.ndarray) -> np.ndarray:
    """Return the held-out bytes: the last tenth."""
    return tokens[len(tokens) - _held_out_bytes(tokens) :]


def _held_out_bytes(tokens: np.ndarray) -> int:
    return int(HELD_OUT_RATIO * len(tokens))


@cache
def digits_parts() -> tuple[Ints, Ints]:
    """Return the indices of digits for training and of those held out: drawn once, class by class."""
    from sklearn.model_selection import train_test_split

    classes = digits()[1]
    trained, held_out = train_test_split(
        np.arange(len(classes)), test_size=HELD_OUT_DIGITS, stratify=classes, random_state=0
    )
    return np.sort(trained), np.sort(held_out)


@dataclass(frozen=True)
class Digits:
    """Images of digits, drawn one by one."""

    batch_size: int

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return images and classes of these rows."""
        trained, _ = digits_parts()
        drawn = trained[np.random.default_rng([seed, step]).integers(0, len(trained), self.batch_size)[rows]]
        return _digits_of(drawn)

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of images of each part."""
        return sizes_of(rows)


@dataclass(frozen=True)
class HeldOutDigits:
    """The held-out images of digits, each once, in one batch."""

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return images and classes of these rows, independent of seed and step."""
        return _digits_of(digits_parts()[1][rows])

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of images of each part."""
        return sizes_of(rows)


def _digits_of(samples: Ints) -> tuple[Tensor, Tensor]:
    images, classes = digits()
    return torch.from_numpy(images[samples]), torch.from_numpy(classes[samples])


@dataclass(frozen=True)
class ModuleClassification:
    """Pieces of the standard library's longest modules, to be classified by their module."""

    modules: tuple[np.ndarray, ...]
    """Bytes of each class from which pieces are drawn."""
    length: int
    batch_size: int

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids (a start, then bytes) and the modules of these rows; all classes are equally likely."""
        random = np.random.default_rng([seed, step])
        classes = random.integers(0, len(self.modules), self.batch_size)
        room = np.array([len(module) for module in self.modules])[classes] - (self.length - 1)
        starts = random.integers(0, room + 1)
        tokens = np.full((len(classes[rows]), self.length), START, dtype=np.int64)
        for row, (module, start) in enumerate(zip(classes[rows], starts[rows], strict=True)):
            tokens[row, 1:] = self.modules[module][start : start + self.length - 1]
        return torch.from_numpy(tokens), torch.from_numpy(classes[rows])

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of pieces of each part."""
        return sizes_of(rows)


def longest_modules(count: int) -> list[np.ndarray]:
    """Return the longest of the standard library's top-level modules, longest first."""
    return sorted(standard_library_files(), key=len, reverse=True)[:count]
