"""A headless Chromium driven over its DevTools pipe, for tests of pages; `CHROMIUM` is None where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """A page that is open; commands are those of the DevTools protocol."""

    def __init__(self, read: int, write: int) -> None:
        self._read = os.fdopen(read, "rb")
        self._write = write
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found: dict[str, Any] = json.loads(
                b"".join(iter(lambda: self._read.read(1), b"\0"))
            )
            if found.get("id") == self._number:
                result: dict[str, Any] = found["result"]
                return result

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@contextmanager
def open_page(address: str) -> Iterator[Page]:
    """Open an address."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def attach() -> None:
        # Copies first: a pipe that has the number 3 or 4 already would be closed, or not be handed on.
        read, write = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
        ]
        browser = subprocess.Popen(
            [CHROMIUM, *arguments, f"--user-data-dir={profile}"],
            preexec_fn=attach,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = Page(ours_in, ours_out)
            page.call("Page.navigate", url=address)
            yield page
        finally:
            browser.kill()
            browser.wait()
            for end in (theirs_in, theirs_out, ours_out):
                os.close(end)
