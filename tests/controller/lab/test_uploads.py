"""Uploads to agents that take long to receive them."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from testbed_controller.lab import clients


class SlowReceiver(http.server.BaseHTTPRequestHandler):
    """Reads a body only after a while, as on a busy host."""

    received: int

    def do_PUT(self) -> None:
        time.sleep(0.5)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).received = len(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowReceiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_weights_may_take_longer_than_a_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.1)
    # More than the sockets of both ends can hold.
    clients.Agent(url, "token").put_shard(bytes(64 << 20))
    assert SlowReceiver.received == 64 << 20
