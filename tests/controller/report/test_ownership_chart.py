"""The chart of the samples that each device owns: one disc for each device and class."""

from __future__ import annotations

import numpy as np
import pytest

from testbed_controller.report.charts import Ownership
from tests.controller.report.drawn_charts import draw_axes, texts_of


def test_areas_of_discs_are_proportional_to_samples() -> None:
    axes = draw_axes(Ownership({"a": {"0": 40, "2": 10}, "b": {"1": 20}}))
    (discs,) = axes.collections
    # Each disc lies at (device, class).
    assert np.array(discs.get_offsets()).tolist() == [[0, 0], [0, 2], [1, 1]]
    sizes = discs.get_sizes()
    # 40, 10 and 20 samples relative to 40.
    assert sizes / sizes[0] == pytest.approx([1, 0.25, 0.5])
    assert texts_of(axes.get_xticklabels()) == ["a", "b"]


def test_many_devices_are_numbered_instead_of_named() -> None:
    owned = {f"device{number}": {"0": 1} for number in range(40)}
    assert "by its place" in draw_axes(Ownership(owned)).get_xlabel()
