"""The commands `testbed init`, which creates the folder of a study, and `testbed validate`."""

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


def run_init(folder: Path) -> str:
    result = CliRunner().invoke(init, [str(folder)])
    if result.exception:
        raise result.exception
    return result.output


@pytest.mark.parametrize("name", ["my-study", "s", "s2026", "on", "null"])
def test_study_is_named_after_its_folder(tmp_path: Path, name: str) -> None:
    # YAML would read the names "on" and "null" as other types, unless they are quoted.
    folder = tmp_path / name
    file_name = f"{name}.yaml"
    output = run_init(folder)
    assert f"next: cd {folder} && testbed run {file_name}" in output
    assert load(folder / file_name).name == name
    assert file_name in (folder / "test_study.py").read_text()
    # The template's own name; "my-study.yaml" contains it too.
    text = (folder / file_name).read_text().replace(file_name, "")
    assert "study.yaml" not in text


def test_init_fills_empty_folder_and_refuses_others(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run_init(folder)
    assert (folder / "empty.yaml").is_file()
    with pytest.raises(InputError, match="already exists: name a new folder"):
        run_init(folder)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Studie ä", "studie-a"),
        # Names begin with a letter and have at most 31 characters.
        ("2026", "study-2026"),
        ("s" * 40, "s" * 31),
        ('a"b', "a-b"),
        ("研究", "study"),
    ],
)
def test_any_folder_name_gives_valid_scenario_name(
    tmp_path: Path, folder: str, name: str
) -> None:
    run_init(tmp_path / folder)
    assert load(tmp_path / folder / f"{name}.yaml").name == name


def test_unreadable_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        run_init(tmp_path)


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


def run_validate(*files: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(validate, [*map(str, files), "--json"])
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return reports


def test_error_in_code_of_method_does_not_stop_validation(tmp_path: Path) -> None:
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
    invalid, valid = run_validate(broken, good)
    assert "mine.py:5: ZeroDivisionError" in invalid["errors"][0]
    assert valid["ok"]
    assert invalid.keys() == valid.keys()


def test_summary_of_sweep_over_devices_has_range(tmp_path: Path) -> None:
    file = tmp_path / "idle.yaml"
    file.write_text(IDLE + "sweep: {devices.a.count: [2, 4]}\n")
    (report,) = run_validate(file)
    # Two devices have 2 · 1 links, four have 4 · 3.
    assert report["summary"].startswith("2 to 4 devices, 2 to 12 directed links, ")
