"""The code blocks of the tutorial, executed in order in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from testbed_controller.cli.main import main
from tests.helpers import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"


CODE_BLOCK = re.compile(
    r"^(<!-- refused -->\n)?```(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE
)
"""A code block as (mark of a command that fails, language, attributes, text)."""


def test_code_blocks_of_tutorial_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_line(line: str, fails: bool) -> str:
        """Run one command and return the output."""
        monkeypatch.setattr("sys.argv", shlex.split(line))
        with pytest.raises(SystemExit) as exit_:
            main()
        output = "".join(capfd.readouterr())
        has_failed = exit_.value.code not in (None, 0)
        assert has_failed == fails, f"{line}\n{output}"
        return output

    monkeypatch.chdir(tmp_path)
    output = ""
    blocks = CODE_BLOCK.findall(TUTORIAL.read_text())
    # The expression must match the blocks of the page.
    assert len(blocks) > 10
    for failure_mark, language, attributes, text in blocks:
        title = re.search(r'title="(.+)"', attributes)
        if title:
            # A block with a title is a file.
            (tmp_path / title[1]).write_text(text)
        elif language == "sh":
            output = ""
            for line in text.splitlines():
                output += run_line(line, fails=bool(failure_mark))
        elif language == "text":
            # A part of the output of the commands before.
            assert text in output
        else:
            assert language == "python"
            exec(compile(text, "tutorial.md", "exec"), {})
