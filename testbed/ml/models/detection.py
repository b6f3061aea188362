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
        """Return plain values, numbers with four decimals.

        >>> Box("dog", 0.87654321, 0.1, 0.2, 0.5, 0.6).to_json()["score"]
        0.8765
        """
        values: dict[str, Any] = asdict(self)
        for name, value in values.items():
            if name != "label":
                values[name] = round(value, 4)
        return values


@dataclass(frozen=True)
class Detector:
    """Parameters for decoding an output."""

    anchors: tuple[tuple[float, float], ...]
    """Width and height, in cells of the grid."""
    labels: tuple[str, ...]
    """Names of the classes, in the order of the channels."""
    threshold: float = 0.5
    """Minimum score of a box."""
    overlap: float = 0.45
    """Intersection over union above which only the better of two boxes of one class is kept."""

    def channels(self, classes: int) -> tuple[int]:
        """Return the number of output channels, as the beginning of a shape."""
        # Position, size and objectness.
        values_per_box = 5 + classes
        return (len(self.anchors) * values_per_box,)

    def boxes(self, output: Floats) -> list[Box]:
        """Return the objects in one sample's output (channels, height, width), best first."""
        return suppress(self.decode(output), self.overlap)

    def decode(self, output: Floats) -> list[Box]:
        """Return every box whose best class reaches the threshold, best first.

        ``output`` is (channels, height, width).
        """
        _, height, width = output.shape
        # (anchors, 5 + classes, height, width), in float64: exponents magnify the rounding of float32.
        values = output.astype(np.float64)
        values = values.reshape(len(self.anchors), -1, height, width)
        anchor_sizes = np.array(self.anchors)[:, :, None, None]
        rows, columns = np.mgrid[0:height, 0:width]
        centre_x = (columns + _sigmoid(values[:, 0])) / width
        centre_y = (rows + _sigmoid(values[:, 1])) / height
        # An exponent that no real box has would overflow and warn.
        width_factor = np.exp(np.minimum(values[:, 2], 50))
        height_factor = np.exp(np.minimum(values[:, 3], 50))
        box_width = anchor_sizes[:, 0] * width_factor / width
        box_height = anchor_sizes[:, 1] * height_factor / height
        scores = _class_scores(values)
        best = scores.max(axis=1)
        classes = scores.argmax(axis=1)
        edges = (
            centre_x - box_width / 2,
            centre_y - box_height / 2,
            centre_x + box_width / 2,
            centre_y + box_height / 2,
        )
        boxes = []
        reaches_threshold = best >= self.threshold
        # (anchor, row, column) of each such box.
        for place in zip(*np.nonzero(reaches_threshold), strict=True):
            # A box may extend beyond the image.
            left, top, right, bottom = (
                float(np.clip(edge[place], 0, 1)) for edge in edges
            )
            label = self.labels[int(classes[place])]
            score = float(best[place])
            boxes.append(Box(label, score, left, top, right, bottom))
        return sorted(boxes, key=lambda box: -box.score)


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # By the hyperbolic tangent, which does not overflow for large negative values.
    return 0.5 * (1 + np.tanh(values / 2))


def _class_scores(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return objectness times softmax, (anchors, classes, height, width)."""
    classes = values[:, 5:]
    # The largest is subtracted, so that no exponential overflows.
    odds = np.exp(classes - classes.max(axis=1, keepdims=True))
    objectness = _sigmoid(values[:, 4])[:, None]
    scores: npt.NDArray[np.float64] = objectness * odds
    total: npt.NDArray[np.float64] = odds.sum(axis=1, keepdims=True)
    return scores / total


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes.

    >>> left_half = Box("cat", 1.0, 0.0, 0.0, 0.5, 1.0)
    >>> whole = Box("cat", 1.0, 0.0, 0.0, 1.0, 1.0)
    >>> overlap(left_half, whole)
    0.5
    """
    left = max(one.left, other.left)
    right = min(one.right, other.right)
    top = max(one.top, other.top)
    bottom = min(one.bottom, other.bottom)
    # Negative for boxes apart from each other.
    width = right - left
    height = bottom - top
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(one) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    width = box.right - box.left
    height = box.bottom - box.top
    return width * height


def suppress(boxes: Sequence[Box], limit: float) -> list[Box]:
    """Drop boxes overlapping a better box of their class by more than ``limit``; ``boxes`` are sorted, best first."""
    kept: list[Box] = []
    for box in boxes:
        rivals = [better for better in kept if better.label == box.label]
        if all(overlap(box, better) <= limit for better in rivals):
            kept.append(box)
    return kept
