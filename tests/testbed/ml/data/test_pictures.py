"""Photographs as inputs: scaling into a frame, orientation, pixel depth, and damaged files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testbed.common.errors import InputError
from testbed.ml.data import describe, load
from testbed.ml.data.dataset import pack, unpack
from testbed.ml.data.pictures import Frame, frame, letterbox, read
from testbed.ml.workload import DataPart

GREY = 128
"""Value of the pixels around a picture."""


def test_photos_are_scaled_with_grey_bars() -> None:
    photos = load(DataPart(name="photos-96x128"))
    assert photos.name == "photos-96x128"
    # The two pictures of scikit-learn have no labels and serve inference only.
    assert photos.classes == 0
    assert photos.shape == (3, 96, 128)
    assert len(photos.train_images) == 0
    assert len(photos.test_images) == 2
    assert photos.test_images.dtype == np.float32
    # 640x427 pixels become 128x85: of 96 rows, 5 are grey above and 6 below.
    assert np.all(photos.test_images[:, :, :5] == np.float32(GREY / 255))
    assert photos.test_images[:, :, 5:90].std() > 0.1
    assert describe("photos").shape == (3, 608, 608)


def test_unpacked_photos_equal_packed_ones() -> None:
    photos = load(DataPart(name="photos-96x128"))
    unpacked = unpack(pack(photos))
    assert unpacked.classes == 0
    assert np.array_equal(unpacked.test_images, photos.test_images)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((50, 100), Frame(16, 0, 32, 64)),
        ((100, 50), Frame(0, 16, 64, 32)),
        ((20, 20), Frame(0, 0, 64, 64)),
        # A side has at least one pixel.
        ((1, 5000), Frame(31, 0, 1, 64)),
    ],
    ids=["portrait", "landscape", "square", "line"],
)
def test_picture_keeps_proportions_in_centre_of_input(
    size: tuple[int, int], expected: Frame
) -> None:
    assert frame(*size, (3, 64, 64)) == expected
    picture = Image.new("RGB", size, (255, 0, 10))
    pixels = letterbox(picture, (3, 64, 64))
    inside = np.zeros((64, 64), dtype=bool)
    rows = slice(expected.top, expected.top + expected.height)
    columns = slice(expected.left, expected.left + expected.width)
    inside[rows, columns] = True
    assert np.array_equal(pixels[0] == 255, inside)
    assert np.all(pixels[:, ~inside] == GREY)


def test_picture_is_rotated_by_exif_orientation(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), (200, 0, 0))
    exif = picture.getexif()
    # The tag of the orientation, with the value for a quarter turn.
    exif[0x0112] = 6
    path = tmp_path / "one.png"
    picture.save(path, exif=exif)
    image = load(DataPart(name="image-32x32", path=str(path)))
    assert image.test_images.shape == (1, 3, 32, 32)
    # Upright, the picture is 16 pixels wide, with bars at the left and the right.
    red = image.test_images[0, 0]
    assert np.allclose(red[:, 16], 200 / 255)
    assert np.allclose(red[:, 0], GREY / 255)


def test_unreadable_picture_is_named(tmp_path: Path) -> None:
    text = tmp_path / "one.jpg"
    text.write_bytes(b"no picture at all")
    with pytest.raises(InputError, match=r"one\.jpg: cannot be read as an image"):
        load(DataPart(name="image"), text)
    complete = tmp_path / "whole.png"
    Image.new("RGB", (300, 300), (1, 2, 3)).save(complete)
    truncated = tmp_path / "cut.png"
    truncated.write_bytes(complete.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"cut\.png: cannot be read as an image"):
        load(DataPart(name="image"), truncated)
    with pytest.raises(InputError, match=r"none\.png: cannot be read"):
        load(DataPart(name="image"), tmp_path / "none.png")


@pytest.mark.parametrize(
    "name", ["photos-", "photos-32", "image-0x32", "photos-99999x32", "image-axb"]
)
def test_malformed_picture_size_is_rejected(name: str) -> None:
    message = r"data\.name: .*such as (photos|image)-608x608"
    with pytest.raises(InputError, match=message):
        describe(name)


def test_sixteen_bit_pixels_are_scaled_to_eight_bits(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    pixels = np.array([[0, 0x1234], [0x8000, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(pixels).save(path)
    red = np.asarray(read(path))[..., 0]
    # The upper byte of each value.
    assert red.tolist() == [[0, 0x12], [0x80, 0xFF]]
