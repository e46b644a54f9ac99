"""Folders of images: every rank decodes its own rows, every epoch has every image once."""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'gssim[data]'")

import torch
from data_files import CLASSES, global_batch, image_tree, refused, workload_for
from PIL import Image

from gsreal.data import sources as data
from gsreal.data.images import centre, random_part
from gssim.errors import UserError

RGB = {"kind": "image", "shape": (3, 16, 12), "classes": 3}
GRAY = {"kind": "image", "shape": (1, 16, 16), "classes": 3}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return image_tree(tmp_path_factory.mktemp("imagenet"))


def table(tree, **changes):
    return {"kind": "image-folder", "folder": str(tree)} | changes


@pytest.mark.parametrize("augment", [False, True])
def test_the_rows_of_any_division_are_the_whole_batch(tree, augment):
    workload = workload_for(RGB, table(tree, augment=augment))
    images, classes = global_batch(workload, seed=1, step=5)
    assert images.shape == (8, 3, 16, 12)
    assert images.dtype == torch.float32
    for division in ([3, 5], [0, 1, 7], [1] * 8):
        ends = np.cumsum(division)
        parts = [
            data.open_source(workload).batch(seed=1, step=5, rows=slice(int(end - size), int(end)))
            for size, end in zip(division, ends, strict=True)
        ]
        assert torch.equal(torch.cat([part for part, _ in parts]), images)
        assert torch.equal(torch.cat([part for _, part in parts]), classes)


def test_only_the_rows_that_are_asked_for_are_decoded(tree):
    source = data.open_source(workload_for(RGB, table(tree)))
    source.batch(seed=0, step=0, rows=slice(2, 5))
    assert len(source._kept) == 3
    assert source.loss_terms(seed=0, step=0, rows=[slice(0, 2), slice(2, 8)]) == [2, 6]
    assert len(source._kept) == 3


def test_every_epoch_has_every_image_once_in_another_order(tree):
    source = data.open_source(workload_for(RGB, table(tree)))
    drawn = [source.batch(seed=3, step=step, rows=slice(0, 8))[0] for step in range(9)]  # 72 = 4 epochs of 18
    pixels = torch.cat(drawn).flatten(1).sum(1).tolist()
    epochs = [pixels[i : i + 18] for i in range(0, 72, 18)]
    assert len(set(epochs[0])) == 18
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = source.batch(seed=4, step=0, rows=slice(0, 8))[0]
    assert not torch.equal(other, drawn[0])


def test_classes_are_the_folders_by_name_and_values_are_normalised(tree):
    source = data.open_source(workload_for(RGB, table(tree, mean=[0, 0, 0], std=[1, 1, 1]), global_batch_size=18))
    images, classes = source.batch(seed=0, step=0, rows=slice(0, 18))
    assert Counter(classes.tolist()) == {0: 6, 1: 6, 2: 6}
    means = images.mean((1, 2, 3))
    for class_ in range(3):  # brightness 80 * class + (0..60), of 255
        assert means[classes == class_].mean() == pytest.approx((80 * class_ + 29.5) / 255, abs=0.01)
    usual = data.open_source(workload_for(RGB, table(tree), global_batch_size=18))
    normal = usual.batch(seed=0, step=0, rows=slice(0, 18))[0]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(normal, (images - mean[:, None, None]) / std[:, None, None], atol=1e-5)


def test_the_split_is_a_folder_inside_or_the_folder_itself(tree):
    assert len(data.open_source(workload_for(RGB, table(tree, split="val"))).index) == 6
    assert len(data.open_source(workload_for(RGB, table(tree / "val"))).index) == 6
    assert len(data.open_source(workload_for(RGB, table(tree))).index) == 18


def test_gray_models_read_coloured_images_and_all_kinds_of_files(tmp_path):
    tree = image_tree(tmp_path, images=1)
    Image.new("CMYK", (30, 30)).save(tree / "train" / CLASSES[0] / "a.jpg")
    Image.new("P", (9, 70)).save(tree / "train" / CLASSES[1] / "b.png")
    Image.new("RGBA", (30, 30)).save(tree / "train" / CLASSES[2] / "png-inside.JPEG", format="PNG")
    for model in (RGB, GRAY):
        images, _ = global_batch(workload_for(model, table(tree)), seed=0, step=0)
        assert images.shape[1:] == model["shape"]
        assert bool(torch.isfinite(images).all())


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_images_of_16_bits_are_scaled_to_8(tmp_path, name):
    """Pillow's conversion made them white, whatever was in them."""
    pictures = [np.linspace(0, 255, 256).reshape(16, 16).round().astype(np.uint8) for _ in range(2)]
    for number, values in enumerate((pictures[0], pictures[1].astype(np.uint16) * 257)):
        (folder := tmp_path / str(number) / "class").mkdir(parents=True)
        Image.fromarray(values).save(folder / name)
    for model in (RGB, GRAY):
        shallow, deep = (
            global_batch(workload_for(model | {"classes": 1}, table(tmp_path / each)), seed=0, step=0)[0]
            for each in ("0", "1")
        )
        assert torch.equal(shallow, deep)
    Image.fromarray(np.zeros((9, 9), np.float32)).save(tmp_path / "0" / "class" / "scores.tiff")
    message = refused(workload_for(GRAY | {"classes": 1}, table(tmp_path / "0")))
    assert "scores.tiff: no readable image: its values have 32 bits" in message


def test_held_out_images_are_of_the_classes_that_are_trained(tmp_path):
    """A class is its folder's place by name: another folder among them would have moved the classes after it."""
    tree = image_tree(tmp_path, images=1)
    workload = workload_for(RGB, table(tree))
    data.check_held_out(workload, where="made")
    os.rename(tree / "val" / CLASSES[1], tree / "val" / "zebra")
    with pytest.raises(UserError, match=r"not those that are trained: 'zebra' is in val alone"):
        data.check_held_out(workload, where="made")


def test_without_augmentation_the_centre_is_the_resized_images_centre(tmp_path):
    tree = image_tree(tmp_path, images=1, size=(64, 64))
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))
    for name in CLASSES:
        for path in (tree / "train" / name).iterdir():
            path.unlink()
        Image.fromarray(ramp).save(tree / "train" / name / "ramp.png")
    square = {"kind": "image", "shape": (3, 28, 28), "classes": 3}
    source = data.open_source(workload_for(square, table(tree, mean=[0, 0, 0], std=[1, 1, 1])))
    image = source.batch(seed=0, step=0, rows=slice(0, 1))[0][0]
    resized = Image.fromarray(ramp).resize((32, 32), Image.Resampling.BILINEAR)  # 28 of 32, as 224 of 256
    expected = np.asarray(resized.crop((2, 2, 30, 30))).transpose(2, 0, 1) / 255
    assert np.abs(image.numpy() - expected).max() <= 1.01 / 255


def test_augmentation_draws_other_parts_of_all_allowed_sizes_each_time(tmp_path):
    tree = image_tree(tmp_path, images=1, size=(64, 48))
    source = data.open_source(workload_for(RGB, table(tree, augment=True), global_batch_size=3))
    seen = [source.batch(seed=0, step=step, rows=slice(0, 3)) for step in range(4)]
    of_one = [images[classes == 0] for images, classes in seen]
    assert len({float(image.sum()) for image in of_one}) == 4
    random = np.random.default_rng(0)
    boxes = np.array([random_part((640, 480), random) for _ in range(400)])
    sides = boxes[:, 2:] - boxes[:, :2]
    areas, ratios = sides.prod(1) / (640 * 480), sides[:, 0] / sides[:, 1]
    assert 0.079 < areas.min() < 0.15
    area, ratio = random.uniform(0.08, 1, 100_000), np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), 100_000))
    fits = (area * ratio <= 4 / 3) & (area / ratio <= 3 / 4)  # what does not is drawn again
    assert areas.mean() == pytest.approx(area[fits].mean(), abs=0.05)  # four standard deviations
    assert 0.74 < ratios.min() < ratios.max() < 1.35
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 640
    assert boxes[:, 3].max() <= 480


def test_every_second_augmented_image_is_mirrored(tmp_path):
    tree = image_tree(tmp_path, images=1, size=(64, 64))
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))
    for name in CLASSES:
        Image.fromarray(ramp).save(tree / "train" / name / f"{name}_0.JPEG")
    source = data.open_source(workload_for(RGB, table(tree, augment=True), global_batch_size=200))
    images = source.batch(seed=0, step=0, rows=slice(0, 200))[0]
    mirrored = (images[:, 0, 0, 0] > images[:, 0, 0, -1]).double().mean()
    assert 0.35 < mirrored < 0.65  # four standard deviations


def test_parts_of_long_images_keep_their_proportions():
    random = np.random.default_rng(0)
    left, top, right, bottom = random_part((1000, 10), random)
    assert (bottom - top) == 10
    assert (right - left) / (bottom - top) <= 4 / 3 + 1e-9
    assert centre((100, 50), (10, 10)) == (50 - 21.875, 25 - 21.875, 50 + 21.875, 25 + 21.875)


@pytest.mark.parametrize("augment", [False, True])
def test_memory_for_decoded_images_is_bounded_and_changes_nothing(tree, augment):
    size = 40 * 30 * 3 if augment else 16 * 12 * 3
    sources = [
        data.open_source(workload_for(RGB, table(tree, augment=augment, cache_bytes=room)))
        for room in (0, 3 * size, 2**20)
    ]
    for step in range(6):
        batches = [source.batch(seed=0, step=step, rows=slice(0, 8))[0] for source in sources]
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2])
    assert [len(source._kept) for source in sources] == [0, 3, 18]


def test_faults_of_folders_are_said_in_one_line(tree, tmp_path):
    assert "no such folder" in refused(workload_for(RGB, table(tmp_path / "nowhere")))
    assert "holds no folders" in refused(workload_for(RGB, table(tmp_path)))
    assert "3 folders of classes, the model has 1000" in refused(workload_for(RGB | {"classes": 1000}, table(tree)))
    assert "1 or 3 channels, the model takes 4" in refused(workload_for(RGB | {"shape": (4, 8, 8)}, table(tree)))
    assert "2 values for 3 channels" in refused(workload_for(RGB, table(tree, mean=[0.5, 0.5])))
    (tmp_path / "train" / "empty").mkdir(parents=True)
    assert "the class 'empty' has no images" in refused(workload_for(RGB, table(tmp_path)))


def test_a_broken_image_is_named_before_ranks_start(tmp_path):
    tree = image_tree(tmp_path, images=2)
    broken = tree / "train" / CLASSES[1] / "half.JPEG"
    whole = (tree / "train" / CLASSES[1] / f"{CLASSES[1]}_0.JPEG").read_bytes()
    for content in (whole[: len(whole) // 2], b"no image", b""):
        broken.write_bytes(content)
        message = refused(workload_for(RGB, table(tree)))
        assert f"{broken}: no readable image: " in message


def test_missing_pillow_gives_an_instruction(tree, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert "needs Pillow: pip install 'gssim[data]'" in refused(workload_for(RGB, table(tree)))


def test_names_that_are_no_utf8_are_read(tmp_path):
    tree = image_tree(tmp_path, images=1)
    folder = tree / "train" / CLASSES[0]
    os.rename(os.fsencode(folder / f"{CLASSES[0]}_0.JPEG"), os.fsencode(folder) + b"/\xff.JPEG")
    data.check_data(replace(workload_for(RGB, table(tree)), global_batch_size=3), where="made")
