"""Scenarios are loaded by name from the working directory or the shipped folder."""

from __future__ import annotations

import pytest

from testbed.scenario.finding import SHIPPED
from testbed.scenario.loading import load
from tests.testbed.scenario.loading_scenario import VALID, error_lines


@pytest.fixture
def folder_of_scenarios(write_scenario, tmp_path):
    """Write small.yaml and a folder of scenarios in the working directory."""
    write_scenario(VALID)
    (tmp_path / "scenarios" / "smoke").mkdir(parents=True)
    (tmp_path / "scenarios" / "quickstart.yaml").write_text(VALID)
    (tmp_path / "scenarios" / "smoke" / "degrade.yaml").write_text(VALID)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart", "scenarios/quickstart.yaml"),
        ("smoke/degrade", "scenarios/smoke/degrade.yaml"),
        ("smoke/degrade.yaml", "scenarios/smoke/degrade.yaml"),
    ],
)
def test_scenario_is_loaded_by_name_from_folder(folder_of_scenarios, name, file):
    assert load(name).source.file == file


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("quikstart", "no such scenario: did you mean 'quickstart'?"),
        ("degrade", "did you mean 'smoke/degrade'?"),
        ("elsewhere/quickstart.yaml", "did you mean 'quickstart'?"),
        (
            "scenarios/smoke/degrad.yaml",
            "did you mean 'scenarios/smoke/degrade.yaml'?",
        ),
    ],
)
def test_similar_name_is_suggested_for_missing_scenario(
    folder_of_scenarios, name, suggestion
):
    assert error_lines(name)[0].endswith(suggestion)


def test_error_without_similar_name_is_short(folder_of_scenarios):
    # It does not list all scenarios.
    assert len(error_lines("nothing-like-it")[0]) < 200


def test_folder_as_scenario_is_rejected(folder_of_scenarios):
    expected = "scenarios: is a folder: name a scenario file in it"
    assert error_lines("scenarios") == [expected]


def test_path_below_file_is_rejected(folder_of_scenarios):
    error = error_lines("small.yaml/x")[0]
    # The error of the operating system differs.
    assert "cannot be read" in error or "no such scenario" in error


def test_shipped_scenario_is_loaded_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").source.file == str(SHIPPED / "quickstart.yaml")
    assert error_lines("quikstart")[0].endswith("did you mean 'quickstart'?")


def test_scenario_in_working_directory_precedes_shipped_scenario(folder_of_scenarios):
    assert load("quickstart").source.file == "scenarios/quickstart.yaml"
