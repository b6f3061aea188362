"""A folder to begin a study with."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.scenario.loading import load
from testbed_controller.cli.validate import init, validate


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


def test_unreadable_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        made(tmp_path)


IDLE = """
name: idle
devices: {a: {profile: laptop, count: 2}}
workload:
  task: infer
  model: {name: mlp}
  data: {name: digits}
  method: {name: single}
  requests: 1
"""


def validated(*files: Path) -> list[dict[str, Any]]:
    shown = CliRunner().invoke(validate, [*map(str, files), "--json"])
    results: list[dict[str, Any]] = json.loads(shown.stdout)
    return results


def test_error_in_the_advice_of_a_method_leaves_other_files_checked(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "from testbed.ml.methods.single import Single\n"
        "class Mine(Single):\n"
        "    name = 'mine'\n"
        "    def advice(self, problem, plan):\n"
        "        return [1 / 0]\n"
    )
    broken, good = tmp_path / "broken.yaml", tmp_path / "good.yaml"
    broken.write_text(IDLE.replace("{name: single}", "{name: mine, file: mine.py}"))
    good.write_text(IDLE)
    refused, accepted = validated(broken, good)
    assert "mine.py:5: ZeroDivisionError" in refused["errors"][0]
    assert accepted["ok"]
    assert refused.keys() == accepted.keys()


def test_summary_of_a_sweep_over_devices_has_their_range(tmp_path: Path) -> None:
    file = tmp_path / "idle.yaml"
    file.write_text(IDLE + "sweep: {devices.a.count: [2, 4]}\n")
    (result,) = validated(file)
    assert result["summary"].startswith("2 to 4 devices, 2 to 12 directed links, ")
