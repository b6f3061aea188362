"""A headless Chromium that is driven over its DevTools pipe; `CHROMIUM` is None if none is installed."""

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
    """An open page, controlled by commands of the DevTools protocol."""

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
        # Commands without a session address the browser instead of the page.
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        # Events of the page arrive between commands and their responses.
        while True:
            response = self._read_message()
            if response.get("id") == self._number:
                result: dict[str, Any] = response["result"]
                return result

    def _read_message(self) -> dict[str, Any]:
        content = b"".join(iter(lambda: self._read.read(1), b"\0"))
        message: dict[str, Any] = json.loads(content)
        return message

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextmanager
def open_page(address: str) -> Iterator[Page]:
    """Start a browser with one page at ``address``."""
    assert CHROMIUM is not None
    browser_in, command_end = os.pipe()
    response_end, browser_out = os.pipe()

    def attach() -> None:
        # Chromium reads commands from descriptor 3 and writes to 4. A pipe may have one of these numbers already, and
        # dup2 would close it or leave it without inheritance: duplicate both first.
        read, write = os.dup(browser_in), os.dup(browser_out)
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
            page = Page(response_end, command_end)
            page.call("Page.navigate", url=address)
            yield page
        finally:
            browser.kill()
            browser.wait()
            # The page owns the fourth end and closes it.
            for end in (browser_in, browser_out, command_end):
                os.close(end)
