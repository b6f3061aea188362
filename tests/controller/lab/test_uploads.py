"""Uploads to slow agents."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from testbed_controller.lab import clients


class SlowReceiver(http.server.BaseHTTPRequestHandler):
    """A server with a delay before it reads a body, as on a busy host."""

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


def test_upload_may_take_longer_than_timeout_of_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.1)
    # More than the socket buffers of both ends.
    size = 64 << 20
    clients.Agent(url, "token").put_shard(bytes(size))
    assert SlowReceiver.received == size
