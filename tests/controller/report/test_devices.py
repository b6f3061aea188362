"""The plot of who owns which samples: a disc for each device and class, by its area."""

from __future__ import annotations

import numpy as np
import pytest

from testbed_controller.report import drawing
from testbed_controller.report.charts import Ownership


def test_areas_are_in_proportion_to_the_samples() -> None:
    figure = drawing.draw(Ownership({"a": {"0": 40, "2": 10}, "b": {"1": 20}}))
    (axes,) = figure.axes
    (discs,) = axes.collections
    assert np.array(discs.get_offsets()).tolist() == [[0, 0], [0, 2], [1, 1]]
    sizes = discs.get_sizes()
    assert sizes / sizes[0] == pytest.approx([1, 0.25, 0.5])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]


def test_many_devices_are_numbered() -> None:
    figure = drawing.draw(
        Ownership({f"device{number}": {"0": 1} for number in range(40)})
    )
    assert "by its place" in figure.axes[0].get_xlabel()
