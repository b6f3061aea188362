"""The parts of ``tests/run``: no test is left out of all of them."""

from __future__ import annotations

import re

from tests.helpers import ROOT


def test_every_file_with_containers_is_in_the_part_for_containers() -> None:
    script = (ROOT / "tests" / "run").read_text()
    [part] = re.findall(r'^part (.*) -m "not timed"', script, re.MULTILINE)
    assert '-m "not containers"' in script
    for folder in ("tests", "papers", "generation"):
        for file in (ROOT / folder).rglob("test_*.py"):
            if re.search(r"\bmark\.containers\b", file.read_text()):
                name = file.relative_to(ROOT).as_posix()
                assert name.startswith(tuple(part.split())), name
