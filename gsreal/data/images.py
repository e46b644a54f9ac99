"""Image folders, one folder per class; images are decoded when they are drawn."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsreal.data.source import samples_at, sizes_of
from gssim.errors import UserError
from gssim.units import Floats, Ints
from gssim.workload import ImageFolder, ImageInput

EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = {1: "L", 3: "RGB"}
"""Pillow's mode for each number of channels."""
CROPPED_RATIO = 224 / 256
"""Fraction of the shorter side that the centre crop keeps: ImageNet's usual evaluation (224 of 256 pixels)."""
AREA_RATIOS, SIDE_RATIOS, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Random resized crop (Szegedy et al. 2015, "Going deeper with convolutions", section 6), as torchvision draws it."""
Box = tuple[float, float, float, float]
Pixels = NDArray[np.uint8]


class Images:
    """Source of batches from the images of a folder, in ImageNet's layout; each image comes once an epoch."""

    def __init__(self, data: ImageFolder, model: ImageInput, batch_size: int) -> None:
        self.data, self.shape, self.batch_size = data, model.shape, batch_size
        self._open = _pillow().open
        self.mode = MODES.get(self.shape[0])
        if self.mode is None:
            raise UserError(
                f"workload.data.kind = 'image-folder': has 1 or 3 channels, the model takes {self.shape[0]}"
            )
        self.mean, self.std = _of_channels(data.mean, self.shape[0]), _of_channels(data.std, self.shape[0])
        self.index = Index(data)
        if len(self.index.classes) != model.classes:
            raise UserError(
                f"workload.data.folder = '{data.folder}': has {len(self.index.classes)} folders of classes, "
                f"the model has {model.classes} classes"
            )
        self._kept: dict[int, Pixels] = {}
        self._kept_bytes = 0

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return images (normalised, fp32) and classes of these rows."""
        samples = samples_at(len(self.index), seed=seed, step=step, batch_size=self.batch_size, rows=rows)
        images = np.empty((len(samples), *self.shape), dtype=np.float32)
        for row, sample in enumerate(samples):
            random = np.random.default_rng([seed, step, rows.start + row])
            pixels = self._augmented(int(sample), random) if self.data.augment else self._cropped(int(sample))
            images[row] = ((pixels / 255.0 - self.mean) / self.std).transpose(2, 0, 1)
        return torch.from_numpy(images), torch.from_numpy(self.index.classes_of(samples))

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of images of each part."""
        return sizes_of(rows)

    def _cropped(self, sample: int) -> Pixels:
        """Return the centre of an image, (height, width, channels)."""
        _, height, width = self.shape
        return self._keep(sample, lambda image: _resized(image, centre(image.size, (width, height)), (width, height)))

    def _augmented(self, sample: int, random: np.random.Generator) -> Pixels:
        """Return a random part of an image, in every second case mirrored, (height, width, channels)."""
        _, height, width = self.shape
        whole = _pillow().fromarray(self._keep(sample, _values).squeeze())
        cropped = _resized(whole, random_part(whole.size, random), (width, height))
        return cropped[:, ::-1] if random.random() < 0.5 else cropped

    def _keep(self, sample: int, made: Callable[[Any], Pixels]) -> Pixels:
        """Return the result of `made` for an image, cached in memory as long as there is room.

        Cached images stay: an epoch visits every image once, so the least recently used is needed next.
        """
        image = self._kept.get(sample)
        if image is None:
            image = made(self._decoded(self.index.path(sample)))
            if self._kept_bytes + image.nbytes <= self.data.cache_bytes:
                self._kept[sample] = image
                self._kept_bytes += image.nbytes
        return image

    def _decoded(self, path: Path) -> Any:
        try:
            with self._open(path) as image:
                return _of_8_bits(image).convert(self.mode)
        except Exception as error:  # Pillow's decoders raise many kinds
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"workload.data.folder: {path}: no readable image: {reason}") from None


class Index:
    """Index of the images: paths and classes, in a few bytes each (ImageNet has 1.3 million)."""

    def __init__(self, data: ImageFolder) -> None:
        self.root, self.classes = class_folders(data)
        names = [
            sorted(path.name for path in (self.root / name).iterdir() if path.suffix.lower() in EXTENSIONS)
            for name in self.classes
        ]
        if not self.classes:
            raise UserError(f"workload.data.folder = '{self.root}': holds no folders; one for each class is needed")
        empty = [name for name, files in zip(self.classes, names, strict=True) if not files]
        if empty:
            raise UserError(f"workload.data.folder = '{self.root}': the class '{empty[0]}' has no images")
        self._ends: Ints = np.cumsum([len(files) for files in names])
        self._names = np.array([os.fsencode(name) for files in names for name in files])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._names)

    def classes_of(self, samples: Ints) -> Ints:
        """Return the classes of these images: the index of their folders by name."""
        return np.searchsorted(self._ends, samples, side="right").astype(np.int64)

    def path(self, sample: int) -> Path:
        """Return an image's path."""
        class_ = int(np.searchsorted(self._ends, sample, side="right"))
        return self.root / self.classes[class_] / os.fsdecode(self._names[sample])


def class_folders(data: ImageFolder) -> tuple[Path, list[str]]:
    """Return the folder that holds one folder for each class, and the names of these, sorted.

    Raises UserError if there is no such folder.
    """
    root = Path(data.folder) / data.split
    root = root if root.is_dir() else Path(data.folder)
    if not root.is_dir():
        raise UserError(f"workload.data.folder = '{data.folder}': no such folder")
    return root, sorted(path.name for path in root.iterdir() if path.is_dir())


def _of_channels(values: tuple[float, ...], channels: int) -> Floats:
    """Return a value for each channel; one channel takes the average."""
    if channels == 1:
        return np.array([np.mean(values)])
    if len(values) != channels:
        raise UserError(f"workload.data.mean, std: {len(values)} values for {channels} channels")
    return np.array(values)


def centre(size: tuple[int, int], wanted: tuple[int, int]) -> Box:
    """Return the part of an image of `size` (width, height) that remains after resizing its shorter side and cropping.

    >>> centre((512, 256), (224, 224))
    (144.0, 16.0, 368.0, 240.0)
    """
    scale = CROPPED_RATIO * min(have / want for have, want in zip(size, wanted, strict=True))
    width, height = (scale * want for want in wanted)
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, left + width, top + height


def random_part(size: tuple[int, int], random: np.random.Generator) -> Box:
    """Return a part of random area, proportions and place, or the largest central one of allowed proportions."""
    width, height = size
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*AREA_RATIOS)
        ratio = np.exp(random.uniform(*np.log(SIDE_RATIOS)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
            return float(left), float(top), float(left + w), float(top + h)
    w_most, h_most = min(width, height * SIDE_RATIOS[1]), min(height, width / SIDE_RATIOS[0])
    left, top = (width - w_most) / 2, (height - h_most) / 2
    return left, top, left + w_most, top + h_most


def _resized(image: Any, box: Box, size: tuple[int, int]) -> Pixels:
    return _values(image.resize(size, resample=_pillow().Resampling.BILINEAR, box=box))


def _values(image: Any) -> Pixels:
    """Return an image's values, (height, width, channels)."""
    values = np.asarray(image)
    return values if values.ndim == 3 else values[:, :, None]


def _of_8_bits(image: Any) -> Any:
    """Return an image of 16 bits a pixel in 8: Pillow's conversions do not scale values, but cut them off at 255.

    Raises ValueError for values of 32 bits, whose range the file does not tell.
    """
    if image.mode.startswith("I;16"):
        # 65,535 = 255 * 257: white stays white, and values are rounded to the nearest
        return _pillow().fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits, in a range that is not known; save it with 8 or 16 bits a channel")
    return image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UserError("workload.data.kind = 'image-folder': needs Pillow: pip install 'gssim[data]'") from None
    return Image
