"""Beginning with what another run left."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import WEIGHTS, _changes


def test_the_results_of_a_run_are_its_weights(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"")
    assert _changes(None, None, tmp_path) == [f'workload.model.weights="{tmp_path / WEIGHTS}"']
    assert _changes(None, None, tmp_path / WEIGHTS) == _changes(None, None, tmp_path)


def test_results_of_several_runs_are_refused_with_their_names(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / WEIGHTS).write_bytes(b"")
    with pytest.raises(InputError, match=r"name the results of one run \(.*/one\)"):
        _changes(None, None, tmp_path)
