"""Decoding of YOLOv2's output, a grid of cells, to labelled boxes around objects.

An anchor is a typical size of a box, a_w x a_h cells. For each cell (x, y) of a grid of W x H cells and each anchor,
the output has the channels t_x, t_y, t_w, t_h, an objectness and one value for each class (Redmon and Farhadi,
"YOLO9000: Better, Faster, Stronger", section 2)::

    centre = (x + sigmoid(t_x)) / W, (y + sigmoid(t_y)) / H      size = a_w exp(t_w) / W, a_h exp(t_h) / H
    score of a class = sigmoid(objectness) x softmax(classes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from testbed.common.lazy import np, npt

Floats: TypeAlias = "npt.NDArray[np.float32]"

_VALUES_BESIDE_CLASSES = 5
"""Channels of an anchor before those of the classes: t_x, t_y, t_w, t_h and objectness."""


@dataclass(frozen=True)
class Box:
    """One detected object; edges are fractions of the image's width or height, from the upper left corner."""

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
    """The parameters for decoding an output."""

    anchors: tuple[tuple[float, float], ...]
    """Width and height of each anchor, in cells of the grid."""
    labels: tuple[str, ...]
    """Names of the classes, in the order of the channels."""
    threshold: float = 0.5
    """Minimum score of a box."""
    overlap: float = 0.45
    """Intersection over union above which only the better of two boxes of one class is kept."""

    def channels(self, classes: int) -> tuple[int]:
        """Return the number of output channels, as the first axis of a shape."""
        values_per_box = _VALUES_BESIDE_CLASSES + classes
        return (len(self.anchors) * values_per_box,)

    def boxes(self, output: Floats) -> list[Box]:
        """Return the objects in the output for one sample, (channels, height, width), best first."""
        return suppress(self.decode(output), self.overlap)

    def decode(self, output: Floats) -> list[Box]:
        """Return every box whose best class reaches the threshold, best first.

        ``output`` is (channels, height, width).
        """
        _, height, width = output.shape
        # In float64, since exponents magnify the rounding of float32.
        values = output.astype(np.float64)
        # (anchors, channels of an anchor, height, width)
        values = values.reshape(len(self.anchors), -1, height, width)
        edges = self._box_edges(values)
        scores = _class_scores(values)
        # (anchors, height, width)
        best_scores = scores.max(axis=1)
        best_classes = scores.argmax(axis=1)
        boxes = []
        reaches_threshold = best_scores >= self.threshold
        # (anchor, row, column) of each such box.
        for place in zip(*np.nonzero(reaches_threshold), strict=True):
            # A box may extend beyond the image.
            left, top, right, bottom = (
                float(np.clip(edge[place], 0, 1)) for edge in edges
            )
            label = self.labels[int(best_classes[place])]
            score = float(best_scores[place])
            boxes.append(Box(label, score, left, top, right, bottom))
        return sorted(boxes, key=lambda box: -box.score)

    def _box_edges(
        self, values: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], ...]:
        """Return left, top, right and bottom of all boxes as fractions of the image, each (anchors, height, width).

        ``values`` is (anchors, channels of an anchor, height, width).
        """
        *_, height, width = values.shape
        anchor_sizes = np.array(self.anchors)[:, :, None, None]
        rows, columns = np.mgrid[0:height, 0:width]
        centre_x = (columns + _sigmoid(values[:, 0])) / width
        centre_y = (rows + _sigmoid(values[:, 1])) / height
        # A larger exponent, which no real box has, would overflow and warn.
        width_factor = np.exp(np.minimum(values[:, 2], 50))
        height_factor = np.exp(np.minimum(values[:, 3], 50))
        box_width = anchor_sizes[:, 0] * width_factor / width
        box_height = anchor_sizes[:, 1] * height_factor / height
        return (
            centre_x - box_width / 2,
            centre_y - box_height / 2,
            centre_x + box_width / 2,
            centre_y + box_height / 2,
        )


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # By the hyperbolic tangent, which does not overflow for large negative values.
    return 0.5 * (1 + np.tanh(values / 2))


def _class_scores(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the score of each class in all boxes, (anchors, classes, height, width).

    ``values`` is (anchors, channels of an anchor, height, width).
    """
    classes = values[:, _VALUES_BESIDE_CLASSES:]
    # The largest value is subtracted, so that no exponential overflows.
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
    """Return the boxes overlapping no better box of their class by more than ``limit``.

    ``boxes`` and the result are sorted, best first. The overlap is the intersection over union.
    """
    best_boxes: list[Box] = []
    for box in boxes:
        rivals = [better for better in best_boxes if better.label == box.label]
        if all(overlap(box, better) <= limit for better in rivals):
            best_boxes.append(box)
    return best_boxes
