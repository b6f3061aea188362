"""Asynchronous 1F1B as a schedule: drawn as in its docstring, the same with an end and without."""

import inspect
import textwrap
from itertools import islice

import pytest

from testbed.ml.schedule import asynchronous_1f1b, draw_grid, peak_in_flight, versions


def test_it_is_as_it_is_drawn():
    drawn = inspect.getdoc(asynchronous_1f1b).split("::\n")[1]
    assert draw_grid(asynchronous_1f1b, 3, 4) == textwrap.dedent(drawn).strip()


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_hold_no_more_than_their_window(stages, window):
    for stage in range(stages):
        actions = list(asynchronous_1f1b(stages, stage, 12, window))
        assert peak_in_flight(actions) == versions.max_in_flight(stages, stage, window)
        assert [action.kind for action in actions].count("update") == 12
        endless = list(islice(asynchronous_1f1b(stages, stage, window=window), 20))
        assert endless == actions[:20]
