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
    # The rows between the bars show the photo instead of a uniform area.
    assert photos.test_images[:, :, 5:90].std() > 0.1


def test_default_input_has_size_of_yolov2() -> None:
    assert describe("photos").shape == (3, 608, 608)


def test_photos_are_equal_after_transfer_to_device() -> None:
    photos = load(DataPart(name="photos-96x128"))
    received = unpack(pack(photos))
    assert received.classes == 0
    assert np.array_equal(received.test_images, photos.test_images)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((50, 100), Frame(left=16, top=0, width=32, height=64)),
        ((100, 50), Frame(left=0, top=16, width=64, height=32)),
        ((20, 20), Frame(left=0, top=0, width=64, height=64)),
        # A side has at least one pixel.
        ((1, 5000), Frame(left=31, top=0, width=1, height=64)),
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
    text_file = tmp_path / "one.jpg"
    text_file.write_bytes(b"no picture at all")
    with pytest.raises(InputError, match=r"one\.jpg: cannot be read as an image"):
        load(DataPart(name="image"), text_file)
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
def test_malformed_or_unsupported_input_size_is_rejected(name: str) -> None:
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
