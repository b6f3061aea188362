"""Agreement of docs/protocols.md with the requests of the agent and of the shaper, and with modules."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from flask import Flask

from testbed_agent.control import create_application as create_agent
from testbed_controller.shaping.server import create_application as create_shaper
from testbed_controller.shaping.shaper import Shaping
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "protocols.md").read_text()


def routes(application: Flask) -> set[str]:
    """Return method and path of each request to an application."""
    answered = set()
    for rule in application.url_map.iter_rules():
        # Flask adds a route for a folder of static files, which the shaper does not have.
        if rule.endpoint == "static":
            continue
        # Flask answers HEAD and OPTIONS for all routes.
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            answered.add(f"{method} {rule.rule}")
    return answered


@pytest.mark.parametrize(
    ("heading", "application"),
    [
        ("Control of a device", create_agent(MagicMock())),
        ("The shaper", create_shaper(create_autospec(Shaping), "token")),
    ],
)
def test_section_lists_every_request(heading: str, application: Any) -> None:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([A-Z]+ /\w+)[?`]", section, re.MULTILINE))
    assert listed == routes(application)


def test_modules_named_on_page_exist() -> None:
    section = PAGE.partition("| step | module of")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+\.py)`", section)
    assert names
    shaping = ROOT / "controller" / "testbed_controller" / "shaping"
    assert [name for name in names if not (shaping / name).is_file()] == []
