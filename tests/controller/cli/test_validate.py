"""A folder to begin a study with."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.scenario.loading import load
from testbed_controller.cli.validate import init


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
    assert "study.yaml" not in (tmp_path / name / f"{name}.yaml").read_text().replace(
        f"{name}.yaml", ""
    )


def test_an_empty_folder_is_filled_and_one_with_anything_in_it_left_alone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    made(folder)
    assert (folder / "empty.yaml").is_file()
    with pytest.raises(InputError, match="already exists: name a new folder"):
        made(folder)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Studie ä", "studie-a"),
        ("2026", "study-2026"),
        ("s" * 40, "s" * 31),
        ('a"b', "a-b"),
        ("研究", "study"),
    ],
)
def test_any_folder_name_gives_a_valid_scenario_name(
    tmp_path: Path, folder: str, name: str
) -> None:
    made(tmp_path / folder)
    assert load(tmp_path / folder / f"{name}.yaml").name == name
