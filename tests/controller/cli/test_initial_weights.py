"""Initial weights from the results of another run."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import WEIGHTS, _weights_file


def test_folder_of_results_stands_for_its_weights_file(tmp_path):
    file = tmp_path / WEIGHTS
    file.write_bytes(b"")
    assert _weights_file(tmp_path) == file
    assert _weights_file(file) == file


def test_results_of_several_runs_are_refused_with_their_names(tmp_path):
    # The folder of a sweep has a folder for each run.
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / WEIGHTS).write_bytes(b"")
    with pytest.raises(InputError, match=r"name the results of one run \(.*/one\)"):
        _weights_file(tmp_path)
