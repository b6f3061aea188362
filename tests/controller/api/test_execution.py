"""Release of a run's resources after an interruption."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from testbed_controller.api import execution
from testbed_controller.watch import server


class FakePageServer:
    """A page server with an interruption while the page is opened."""

    address = "http://127.0.0.1:1"
    is_closed = False

    def __init__(self, *_: object) -> None:
        page_servers.append(self)

    def show(self) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        self.is_closed = True


page_servers: list[FakePageServer] = []


def test_page_server_is_closed_if_the_page_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "PageServer", FakePageServer)
    console = Console(file=io.StringIO())
    page = execution._live_page(tmp_path, "simulate", console)
    with pytest.raises(KeyboardInterrupt), page:
        pass
    [page_server] = page_servers
    assert page_server.is_closed
