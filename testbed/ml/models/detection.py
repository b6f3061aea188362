"""Decoding of YOLOv2's output: grid cells and anchors to labelled boxes.

For each cell (x, y) of a grid of W x H and each anchor (a_w, a_h), in cells, the channels hold t_x, t_y, t_w, t_h, an
objectness and one value for each class (Redmon and Farhadi, "YOLO9000: Better, Faster, Stronger", section 2)::

    centre = (x + sigmoid(t_x)) / W, (y + sigmoid(t_y)) / H      size = a_w exp(t_w) / W, a_h exp(t_h) / H
    score of a class = sigmoid(objectness) x softmax(classes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from testbed.common.lazy import np, npt

Floats: TypeAlias = "npt.NDArray[np.float32]"


@dataclass(frozen=True)
class Box:
    """One detected object; positions are fractions of the network's input, from its upper left corner."""

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            name: value if name == "label" else round(value, 4)
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Detector:
    """Parameters for decoding an output."""

    anchors: tuple[tuple[float, float], ...]
    """Width and height, in cells of the grid."""
    labels: tuple[str, ...]
    threshold: float = 0.5
    """Minimum score of a box."""
    overlap: float = 0.45
    """Intersection over union above which only the better of two boxes of one class is kept."""

    def channels(self, classes: int) -> tuple[int]:
        """Return the number of output channels, as the beginning of a shape."""
        return (len(self.anchors) * (5 + classes),)

    def boxes(self, output: Floats) -> list[Box]:
        """Return the objects in one sample's output (channels, height, width), best first."""
        return suppress(self.decode(output), self.overlap)

    def decode(self, output: Floats) -> list[Box]:
        """Return every box whose best class reaches the threshold, best first."""
        _, height, width = output.shape
        values = output.astype(np.float64).reshape(len(self.anchors), -1, height, width)
        sizes = np.array(self.anchors)[:, :, None, None]
        rows, columns = np.mgrid[0:height, 0:width]
        centre_x = (columns + _sigmoid(values[:, 0])) / width
        centre_y = (rows + _sigmoid(values[:, 1])) / height
        # An exponent that no real box has would overflow and warn.
        wide = sizes[:, 0] * np.exp(np.minimum(values[:, 2], 50)) / width
        high = sizes[:, 1] * np.exp(np.minimum(values[:, 3], 50)) / height
        odds = np.exp(values[:, 5:] - values[:, 5:].max(axis=1, keepdims=True))
        scores = (
            _sigmoid(values[:, 4])[:, None] * odds / odds.sum(axis=1, keepdims=True)
        )
        best = scores.max(axis=1)
        edges = (
            centre_x - wide / 2,
            centre_y - high / 2,
            centre_x + wide / 2,
            centre_y + high / 2,
        )
        boxes = [
            Box(
                self.labels[int(scores[(place[0], slice(None), *place[1:])].argmax())],
                float(best[place]),
                *(float(np.clip(edge[place], 0, 1)) for edge in edges),
            )
            for place in zip(*np.nonzero(best >= self.threshold), strict=True)
        ]
        return sorted(boxes, key=lambda box: -box.score)


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(values / 2))


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    wide = min(one.right, other.right) - max(one.left, other.left)
    high = min(one.bottom, other.bottom) - max(one.top, other.top)
    shared = max(wide, 0.0) * max(high, 0.0)
    both = (
        sum((box.right - box.left) * (box.bottom - box.top) for box in (one, other))
        - shared
    )
    return shared / both if both > 0 else 0.0


def suppress(boxes: Sequence[Box], limit: float) -> list[Box]:
    """Drop boxes overlapping a better box of their class by more than ``limit``; ``boxes`` are sorted, best first."""
    kept: list[Box] = []
    for box in boxes:
        if all(
            box.label != better.label or overlap(box, better) <= limit
            for better in kept
        ):
            kept.append(box)
    return kept
