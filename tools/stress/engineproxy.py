"""Something between the controller and the engine that can be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from testbed_controller.lab.engineaddress import chosen_engine


class EngineProxy:
    """Passes connections on to the engine, unless it is cut."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        """For ``DOCKER_HOST``."""
        self._path = path
        self._engine = urlsplit(chosen_engine().url).path
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.mend()

    def cut(self) -> None:
        """End all connections, and take no new ones."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        self._path.unlink()
        for one in [listener, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        listener.close()

    def mend(self) -> None:
        """Take connections again."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        threading.Thread(
            target=self._accept, args=(self._listener,), daemon=True
        ).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._engine)
                self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pass, args=(one, other), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        self._open.discard(source)


@contextmanager
def proxied(folder: Path) -> Iterator[EngineProxy]:
    """Have a proxy in a folder, whose path is short."""
    proxy = EngineProxy(folder / "engine.sock")
    try:
        yield proxy
    finally:
        with suppress(AssertionError):
            proxy.cut()
