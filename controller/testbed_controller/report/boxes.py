"""Pictures of object detection requests with the detected boxes."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from testbed.common.seeds import derive
from testbed.trace.events import Event
from testbed.trace.log import EventLog

if TYPE_CHECKING:
    from testbed.ml.data.dataset import Dataset

MAX_PICTURES = 16
"""Maximum number of pictures of a run."""


def pictures(events: Sequence[Event], dataset: Dataset) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, PNG) of the first requested pictures, each with the boxes of the first answer."""
    first_answers: dict[int, Mapping[str, Any]] = {}
    for event in EventLog.made_of(events).of("objects"):
        # A later request may ask for the same picture again.
        first_answers.setdefault(event.fields["sample"], event.fields)
    for sample, answer in list(first_answers.items())[:MAX_PICTURES]:
        picture = draw(dataset.test_images[sample], answer["boxes"])
        yield f"boxes-{sample}.png", picture


def write(folder: Path, events: Sequence[Event], dataset: Dataset) -> None:
    """Write the pictures of a run as ``boxes-<sample>.png`` into the run's folder; none without Pillow."""
    if find_spec("PIL") is None:
        return
    for name, content in pictures(events, dataset):
        (folder / name).write_bytes(content)


def draw(image: npt.NDArray[np.float32], boxes: Sequence[Mapping[str, Any]]) -> bytes:
    """Return an image (channels, height, width) in [0, 1] with boxes and their labels, as PNG."""
    from PIL import Image, ImageDraw

    # A grey picture has one channel, and Pillow's colours need three.
    channels = image[:3]
    if len(image) == 1:
        channels = np.broadcast_to(image, (3, *image.shape[1:]))
    pixels = (channels.transpose(1, 2, 0) * 255).round().astype(np.uint8)
    picture = Image.fromarray(pixels)
    width, height = picture.size
    pen = ImageDraw.Draw(picture)
    # The first box has the highest score, and is drawn over the others.
    for box in reversed(boxes):
        colour = _label_colour(box["label"])
        # Boxes are shares of the picture, and Pillow draws in pixels.
        left = box["left"] * width
        top = box["top"] * height
        corners = [left, top, box["right"] * width, box["bottom"] * height]
        pen.rectangle(corners, outline=colour, width=2)
        text_position = (left + 3, top + 2)
        text = f"{box['label']} {box['score']:.0%}"
        pen.rectangle(pen.textbbox(text_position, text), fill=colour)
        pen.text(text_position, text, fill="black")
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def _label_colour(label: str) -> tuple[int, int, int]:
    """Return a light colour derived from the label, on which black text is legible."""
    # By a hash, so that a label has the same colour in all pictures and runs.
    hue = derive(0, "colour", label) % 360 / 360
    red, green, blue = colorsys.hls_to_rgb(hue, 0.65, 0.9)
    return round(red * 255), round(green * 255), round(blue * 255)
