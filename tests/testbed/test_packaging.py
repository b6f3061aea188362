"""The packages of an installation."""

from __future__ import annotations

import re
import tomllib

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_an_installation_without_extras_is_small() -> None:
    assert len(PROJECT["dependencies"]) <= 14


def test_every_extra_is_documented() -> None:
    section = (ROOT / "docs" / "README.md").read_text().partition("## Extras")[2]
    names = {
        name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert names == set(PROJECT["optional-dependencies"])
