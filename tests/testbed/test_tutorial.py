"""The tutorial's blocks, run one after the other in an empty folder, as a reader would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from testbed_controller.cli.main import main
from tests.helpers import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"


def test_every_block_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = ""
    blocks = re.findall(
        r"^(<!-- refused -->\n)?```(\w+)(.*)\n((?:.*\n)*?)```$",
        TUTORIAL.read_text(),
        re.MULTILINE,
    )
    assert len(blocks) > 10
    for refused, language, note, text in blocks:
        title = re.search(r'title="(.+)"', note)
        if title:
            (tmp_path / title[1]).write_text(text)
        elif language == "sh":
            shown = "".join(
                _said(line, monkeypatch, capfd, bool(refused))
                for line in text.splitlines()
            )
        elif language == "text":
            assert text in shown
        else:
            assert language == "python"
            exec(compile(text, "tutorial.md", "exec"), {})


def _said(
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fails: bool,
) -> str:
    """Run one command and return what it prints."""
    monkeypatch.setattr("sys.argv", shlex.split(line))
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert (ended.value.code in (None, 0)) != fails, f"{line}\n{out}{err}"
    return out + err
