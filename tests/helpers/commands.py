"""The `testbed` command in this process, which has imported what a process of its own would import first."""

from __future__ import annotations

import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from testbed_controller.cli.main import main

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""For which the command has handlers of its own."""


class CompletedCommand(NamedTuple):
    """What a process would have left."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: str | Path, **environment: str) -> CompletedCommand:
    """Run `testbed` with these arguments; what it does not catch is raised here, where a user would see a traceback."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        for _ in range(2)
    )
    handlers = [signal.getsignal(number) for number in SIGNALS]
    code: object = 0
    argv = mock.patch("sys.argv", ["testbed", *map(str, arguments)])
    with (
        argv,
        mock.patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            for number, handler in zip(SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
    assert isinstance(code, int)
    said, complained = (each.buffer.getvalue().decode() for each in (out, err))  # type: ignore[attr-defined]
    return CompletedCommand(code, said, complained)
