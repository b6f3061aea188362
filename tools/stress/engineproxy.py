"""A proxy between the controller and the engine, which can cut the connections like an engine that stops."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from testbed_controller.lab.engineaddress import chosen_engine


class EngineProxy:
    """Forwards connections to the engine, except while cut."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        """Address of the proxy for ``DOCKER_HOST``."""
        self._path = path
        self._engine = urlsplit(chosen_engine().url).path
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.mend()

    def cut(self) -> None:
        """Close all connections, and accept no new ones."""
        listener = self._listener
        assert listener is not None
        self._listener = None
        # Without the file, a new connection is refused at once, as by an engine that does not run.
        self._path.unlink()
        for connection in [listener, *self._open]:
            # Closing alone would not wake a thread that waits in `accept` or `recv`.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        listener.close()

    def mend(self) -> None:
        """Accept connections again."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        _start_thread(self._accept_connections, self._listener)

    def _accept_connections(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._engine)
                self._open |= {client, engine}
                _start_thread(self._forward_bytes, client, engine)
                _start_thread(self._forward_bytes, engine, client)

    def _forward_bytes(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            # The other direction stays open: a client may end its request and wait for the answer.
            sink.shutdown(socket.SHUT_WR)
        self._open.discard(source)


def _start_thread(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


@contextmanager
def proxied(folder: Path) -> Iterator[EngineProxy]:
    """Run a proxy whose socket is in a folder; the path of a socket has at most 107 characters."""
    proxy = EngineProxy(folder / "engine.sock")
    try:
        yield proxy
    finally:
        # Raised by a proxy that is cut already.
        with suppress(AssertionError):
            proxy.cut()
