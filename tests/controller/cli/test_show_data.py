"""The command `testbed show data` with splits."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed_controller.cli.data import data


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("foo", "choose one of coordinator, iid"),
        ("shards", "choose one of coordinator, iid"),
        ("shards=two", "'two' must be a whole number"),
        ("shards={", "'{' must be a whole number"),
        ("dirichlet=abc", "'abc' must be a number"),
        ("label=3", "unknown key 'label'"),
    ],
)
def test_invalid_split_is_refused_as_in_scenario(split: str, reason: str) -> None:
    error = CliRunner().invoke(data, ["digits", "--split", split]).exception
    assert isinstance(error, InputError)
    assert str(error).startswith(f"--split {split}: split")
    assert reason in str(error)


@pytest.mark.parametrize("split", ["iid", "shards=2", "dirichlet=0.3", "quantity=0.5"])
def test_samples_of_each_device_are_shown(split: str) -> None:
    arguments = ["digits", "--split", split, "--devices", "4", "--json"]
    result = CliRunner().invoke(data, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert list(facts["shares"]) == ["device1", "device2", "device3", "device4"]
    # One count for each class.
    for counts in facts["shares"].values():
        assert sum(counts) > 0


@pytest.mark.parametrize("option", ["--split", "--folder", "--path"])
def test_options_of_single_data_set_need_name(option: str) -> None:
    error = CliRunner().invoke(data, [option, "x"]).exception
    assert isinstance(error, InputError)
    assert str(error) == f"{option}: name the data set as well"
