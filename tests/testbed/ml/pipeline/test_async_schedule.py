"""Tests of the asynchronous 1F1B schedule: its drawing, its batches in flight, and its infinite form."""

import inspect
import textwrap
from itertools import islice

import pytest

from testbed.ml.schedule import asynchronous_1f1b, draw_grid, peak_in_flight, versions


def test_docstring_shows_grid_of_asynchronous_1f1b():
    drawing = inspect.getdoc(asynchronous_1f1b).split("::\n")[1]
    assert draw_grid(asynchronous_1f1b, 3, 4) == textwrap.dedent(drawing).strip()


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_batches_in_flight_are_limited_by_stages_and_window(stages, window):
    for stage in range(stages):
        actions = list(asynchronous_1f1b(stages, stage, 12, window))
        assert peak_in_flight(actions) == versions.max_in_flight(stages, stage, window)
        assert [action.kind for action in actions].count("update") == 12
        # Without a number of batches the schedule is infinite, and begins alike.
        infinite = asynchronous_1f1b(stages, stage, window=window)
        assert list(islice(infinite, 20)) == actions[:20]
