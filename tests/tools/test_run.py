"""The parts of ``tests/run``, which together run every test."""

from __future__ import annotations

import re

from tests.helpers import ROOT


def test_part_for_containers_includes_every_test_with_containers() -> None:
    script = (ROOT / "tests" / "run").read_text()
    # The paths of the only part that does not exclude tests with containers.
    [paths] = re.findall(r'^part (.*) -m "not timed"', script, re.MULTILINE)
    assert '-m "not containers"' in script
    for folder in ("tests", "papers", "generation"):
        for file in (ROOT / folder).rglob("test_*.py"):
            if re.search(r"\bmark\.containers\b", file.read_text()):
                name = file.relative_to(ROOT).as_posix()
                assert name.startswith(tuple(paths.split())), name
