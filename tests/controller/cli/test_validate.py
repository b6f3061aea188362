"""A folder to begin a study with."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli.validate import init
from testbed.common.errors import InputError
from testbed.scenario.loading import load


def made(folder: Path) -> str:
    result = CliRunner().invoke(init, [str(folder)])
    if result.exception:
        raise result.exception
    return result.output


@pytest.mark.parametrize("name", ["my-study", "s", "s2026", "on", "null"])
def test_a_study_is_called_as_its_folder(tmp_path: Path, name: str) -> None:
    said = made(tmp_path / name)
    assert f"next: cd {tmp_path / name} && testbed run {name}.yaml" in said
    scenario = load(tmp_path / name / f"{name}.yaml")
    assert scenario.name == name
    assert f"{name}.yaml" in (tmp_path / name / "test_study.py").read_text()
    assert "study.yaml" not in (tmp_path / name / f"{name}.yaml").read_text().replace(f"{name}.yaml", "")


def test_an_empty_folder_is_filled_and_one_with_anything_in_it_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    made(folder)
    assert (folder / "empty.yaml").is_file()
    with pytest.raises(InputError, match="is there already: name a new folder"):
        made(folder)


def test_a_name_that_is_none_of_a_scenario_leaves_no_trace(tmp_path: Path) -> None:
    for name in ("My Study", "2026", "s" * 32, 'a"b'):
        with pytest.raises(InputError, match=f"'{name}' is no name of a scenario"):
            made(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_of_the_users_is_still_there_where_its_name_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "My Study"
    folder.mkdir()
    with pytest.raises(InputError, match="is no name of a scenario"):
        made(folder)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
