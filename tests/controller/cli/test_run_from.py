"""Beginning with what another run left."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import WEIGHTS, _weights_in


def test_the_results_of_a_run_are_its_weights(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"")
    assert (
        _weights_in(tmp_path) == _weights_in(tmp_path / WEIGHTS) == tmp_path / WEIGHTS
    )


def test_results_of_several_runs_are_refused_with_their_names(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / WEIGHTS).write_bytes(b"")
    with pytest.raises(InputError, match=r"name the results of one run \(.*/one\)"):
        _weights_in(tmp_path)
