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
"""Default height and width, which YOLOv2 uses."""
BORDER = 128
"""Grey level, of 255, of the border around images of another aspect ratio."""
MAX_SIDE = 10_000
"""Maximum side of the input in pixels; larger values are typing errors."""
_NAME = re.compile(r"(?P<kind>photos|image)(?:-(?P<height>\d+)x(?P<width>\d+))?\Z")
"""The name of a data set of photographs, such as photos or image-160x320."""
_NAME_BEGIN = re.compile(r"(photos|image)(-|\Z)")
"""The beginning of such a name, also of a name with a malformed size."""


class Frame(NamedTuple):
    """The position of an image within the input, in pixels."""

    left: int
    top: int
    width: int
    height: int


def is_picture(name: str) -> bool:
    """Return whether a data set name denotes photographs, even with a malformed size."""
    return _NAME_BEGIN.match(name) is not None


def parse(name: str) -> tuple[str, tuple[int, int, int]]:
    """Return kind and shape (3, height, width) of ``photos[-HxW]`` or ``image[-HxW]``; raises `InputError`.

    >>> parse("photos-160x320")
    ('photos', (3, 160, 320))
    """
    match = _NAME.match(name)
    if match is None:
        raise InputError(
            f"'{name}' is not photos-HEIGHTxWIDTH or image-HEIGHTxWIDTH, such as photos-608x608",
            ("data", "name"),
        )
    height = int(match["height"] or SIZE[0])
    width = int(match["width"] or SIZE[1])
    smallest = min(height, width)
    largest = max(height, width)
    if smallest < 1 or largest > MAX_SIDE:
        raise InputError(
            f"'{name}' needs sides of 1 to {MAX_SIDE} pixels, such as {match['kind']}-608x608",
            ("data", "name"),
        )
    return match["kind"], (3, height, width)


def frame(width: int, height: int, shape: Sequence[int]) -> Frame:
    """Return the largest centred frame with the aspect ratio of an image of the given width and height.

    ``shape`` is the shape of the network's input, (channels, height, width).

    >>> frame(640, 320, (3, 160, 160))
    Frame(left=0, top=40, width=160, height=80)
    """
    _, input_height, input_width = shape
    scale = min(input_width / width, input_height / height)
    # At least one pixel, for images that are much wider than high.
    frame_width = max(1, int(width * scale))
    frame_height = max(1, int(height * scale))
    left = (input_width - frame_width) // 2
    top = (input_height - frame_height) // 2
    return Frame(left, top, frame_width, frame_height)


def letterbox(picture: Image, shape: Sequence[int]) -> Bytes:
    """Return an image, enlarged or reduced to fit into a shape, (3, height, width), with grey borders.

    The aspect ratio stays the same.
    """
    from PIL import Image

    place = frame(picture.width, picture.height, shape)
    resized = picture.convert("RGB").resize(
        (place.width, place.height), Image.Resampling.BILINEAR
    )
    filled = np.full(tuple(shape), BORDER, dtype=np.uint8)
    rows = slice(place.top, place.top + place.height)
    columns = slice(place.left, place.left + place.width)
    # Pillow has the colours last.
    filled[:, rows, columns] = np.asarray(resized).transpose(2, 0, 1)
    return filled


def photos() -> list[Image]:
    """Return scikit-learn's two photographs: a Chinese palace and a flower, each of 640x427."""
    purpose = "the data set of photographs"
    samples = require_extra("sklearn.datasets", "pictures", purpose)
    pillow = require_extra("PIL.Image", "pictures", purpose)
    return [pillow.fromarray(pixels) for pixels in samples.load_sample_images().images]


def read(path: Path) -> Image:
    """Read a file in any format of Pillow, rotated by the EXIF orientation; raises `InputError` naming the file."""
    require_extra("PIL", "pictures", f"reading {path}")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            # Pillow converts images of 16 bits by clipping values above 255, which makes them white.
            if upright.mode.startswith("I;16"):
                upper_bytes = np.asarray(upright) >> 8
                upright = Image.fromarray(upper_bytes.astype(np.uint8))
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
