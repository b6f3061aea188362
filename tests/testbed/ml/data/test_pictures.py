"""Photographs as inputs: their shapes, their place in the input, what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testbed.common.errors import InputError
from testbed.ml.data import describe, load
from testbed.ml.data.dataset import pack, unpack
from testbed.ml.data.pictures import Frame, frame, letterbox, read
from testbed.ml.workload import DataPart


def test_photos_come_with_scikit_learn() -> None:
    photos = load(DataPart(name="photos-96x128"))
    assert (photos.name, photos.classes, photos.shape) == (
        "photos-96x128",
        0,
        (3, 96, 128),
    )
    assert (len(photos.train_images), len(photos.test_images)) == (0, 2)
    assert photos.test_images.dtype == np.float32
    # 640x427 in 128x96: as wide as the input, 85 high, 5 rows of grey above.
    assert np.all(photos.test_images[:, :, :5] == np.float32(128 / 255))
    assert photos.test_images[:, :, 5:90].std() > 0.1
    assert describe("photos").shape == (3, 608, 608)
    again = unpack(pack(photos))
    assert (again.classes, again.test_images.tolist()) == (
        0,
        photos.test_images.tolist(),
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((50, 100), Frame(16, 0, 32, 64)),
        ((100, 50), Frame(0, 16, 64, 32)),
        ((20, 20), Frame(0, 0, 64, 64)),
        ((1, 5000), Frame(31, 0, 1, 64)),
    ],
)
def test_a_picture_keeps_its_proportions_and_lies_in_the_middle(
    size: tuple[int, int], expected: Frame
) -> None:
    assert frame(*size, (3, 64, 64)) == expected
    filled = letterbox(Image.new("RGB", size, (255, 0, 10)), (3, 64, 64))
    inside = np.zeros((64, 64), dtype=bool)
    inside[
        expected.top : expected.top + expected.height,
        expected.left : expected.left + expected.width,
    ] = True
    assert np.array_equal(filled[0] == 255, inside)
    assert np.all(filled[:, ~inside] == 128)


def test_a_picture_is_read_from_its_file_turned_as_the_camera_says(
    tmp_path: Path,
) -> None:
    picture = Image.new("RGB", (40, 20), (200, 0, 0))
    exif = picture.getexif()
    exif[0x0112] = 6  # a quarter turn
    picture.save(tmp_path / "one.png", exif=exif)
    image = load(DataPart(name="image-32x32", path=str(tmp_path / "one.png")))
    assert image.test_images.shape == (1, 3, 32, 32)
    assert np.allclose(image.test_images[0, 0, :, 16], 200 / 255)
    assert np.allclose(image.test_images[0, 0, :, 0], 128 / 255)


def test_malformed_pictures_are_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"no picture at all")
    with pytest.raises(InputError, match=r"one\.jpg: cannot be read as an image"):
        load(DataPart(name="image"), tmp_path / "one.jpg")
    Image.new("RGB", (300, 300), (1, 2, 3)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-200])
    with pytest.raises(InputError, match=r"cut\.png: cannot be read as an image"):
        load(DataPart(name="image"), tmp_path / "cut.png")
    with pytest.raises(InputError, match=r"none\.png: cannot be read"):
        load(DataPart(name="image"), tmp_path / "none.png")


@pytest.mark.parametrize(
    "name", ["photos-", "photos-32", "image-0x32", "photos-99999x32", "image-axb"]
)
def test_malformed_picture_sizes_are_rejected(name: str) -> None:
    with pytest.raises(
        InputError, match=r"data\.name: .*such as (photos|image)-608x608"
    ):
        describe(name)


def test_sixteen_bits_a_pixel_are_scaled_to_eight(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 0x1234], [0x8000, 0xFFFF]], dtype=np.uint16)).save(
        tmp_path / "deep.png"
    )
    assert np.asarray(read(tmp_path / "deep.png"))[..., 0].tolist() == [
        [0, 0x12],
        [0x80, 0xFF],
    ]
