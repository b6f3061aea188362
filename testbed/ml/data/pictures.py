"""Photographs as network inputs: each image is scaled as a whole into the input size of the network.

Two data sets have no labels and serve inference only: ``photos`` are the two sample photographs of scikit-learn,
``image`` is a file of the user. Their names include the network's input size, as in ``photos-160x160``: every device
knows the scenario, but only the coordinator receives the images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from testbed.common.errors import InputError
from testbed.common.lazy import np, require_extra
from testbed.ml.data.files import Bytes

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = (608, 608)
"""Default height and width."""
BORDER = 128
"""Grey level of the border around images of another aspect ratio."""
MOST_PIXELS = 10_000
"""Maximum side of the input in pixels; larger values are typing errors."""
_NAME = re.compile(r"(?P<kind>photos|image)(?:-(?P<height>\d+)x(?P<width>\d+))?\Z")
_KIND = re.compile(r"(photos|image)(-|\Z)")


class Frame(NamedTuple):
    """The position of an image within the input, in pixels."""

    left: int
    top: int
    wide: int
    high: int


def is_picture(name: str) -> bool:
    """Return whether a data set name denotes photographs, even with a malformed size."""
    return _KIND.match(name) is not None


def parse(name: str) -> tuple[str, tuple[int, int, int]]:
    """Return kind and shape (3, height, width) of ``photos[-HxW]`` or ``image[-HxW]``; raises `InputError`."""
    match = _NAME.match(name)
    if match is None:
        raise InputError(
            f"'{name}' is not photos-HEIGHTxWIDTH or image-HEIGHTxWIDTH, such as photos-608x608",
            ("data", "name"),
        )
    height, width = (
        int(match[key] or default)
        for key, default in zip(("height", "width"), SIZE, strict=True)
    )
    if not (1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS):
        raise InputError(
            f"'{name}' needs sides of 1 to {MOST_PIXELS} pixels, such as {match['kind']}-608x608",
            ("data", "name"),
        )
    return match["kind"], (3, height, width)


def frame(width: int, height: int, shape: Sequence[int]) -> Frame:
    """Return the largest centred frame with the aspect ratio of the image."""
    _, room_high, room_wide = shape
    scale = min(room_wide / width, room_high / height)
    wide, high = max(1, int(width * scale)), max(1, int(height * scale))
    return Frame((room_wide - wide) // 2, (room_high - high) // 2, wide, high)


def letterbox(picture: Image, shape: Sequence[int]) -> Bytes:
    """Return an image as (3, height, width) with its aspect ratio kept and grey borders."""
    from PIL import Image

    place = frame(picture.width, picture.height, shape)
    resized = picture.convert("RGB").resize(
        (place.wide, place.high), Image.Resampling.BILINEAR
    )
    filled = np.full(tuple(shape), BORDER, dtype=np.uint8)
    inside = (
        slice(place.top, place.top + place.high),
        slice(place.left, place.left + place.wide),
    )
    filled[:, *inside] = np.asarray(resized).transpose(2, 0, 1)
    return filled


def photos() -> list[Image]:
    """Return scikit-learn's two photographs: a Chinese palace and a flower, each of 640x427."""
    samples = require_extra(
        "sklearn.datasets", "pictures", "the data set of photographs"
    ).load_sample_images()
    from_array = require_extra(
        "PIL.Image", "pictures", "the data set of photographs"
    ).fromarray
    return [from_array(pixels) for pixels in samples.images]


def read(path: Path) -> Image:
    """Read a file in any format of Pillow, rotated by its EXIF orientation; raises `InputError` naming the file."""
    require_extra("PIL", "pictures", f"reading {path}")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            # Pillow would cut what exceeds 255 instead of scaling it, and leave a picture all white.
            if upright.mode.startswith("I;16"):
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except UnidentifiedImageError:
        raise InputError(
            f"{path}: cannot be read as an image: use a JPEG or PNG file"
        ) from None
    except (Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as an image: {error}") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read as an image: {error.strerror or error}"
        ) from None
