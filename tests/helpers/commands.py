"""The `testbed` command, run in this process to save the time of its imports."""

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
"""Signals for which the command installs handlers."""


class CompletedCommand(NamedTuple):
    """The exit status and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: str | Path, **environment: str) -> CompletedCommand:
    """Run `testbed` with these arguments.

    Raises each exception that the command does not catch; a user would see its traceback.
    """
    out_bytes, err_bytes = io.BytesIO(), io.BytesIO()
    out = io.TextIOWrapper(out_bytes, encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(err_bytes, encoding="utf-8", write_through=True)
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
        except SystemExit as exit_request:
            code = exit_request.code or 0
        finally:
            # The handlers belong to the command and would change how later tests react to signals.
            for number, handler in zip(SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
    assert isinstance(code, int)
    stdout, stderr = out_bytes.getvalue().decode(), err_bytes.getvalue().decode()
    return CompletedCommand(code, stdout, stderr)
