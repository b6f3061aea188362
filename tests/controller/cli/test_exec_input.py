"""Standard input of `testbed exec -i`, without an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# The engine prints "done" and closes the connection, after the end of the input if {reads}; the exit code is 3.
COMMAND = """
import socket, struct, sys, threading
from types import SimpleNamespace
from testbed_controller.cli.lab import execute
from testbed_controller.lab import engine, runstate

ours, theirs = socket.socketpair()

def answer():
    if {reads}:
        while theirs.recv(1 << 16):
            pass
    theirs.sendall(struct.pack(">BxxxL", 1, 5) + b"done\\n")
    theirs.close()

api = SimpleNamespace(
    exec_create=lambda *_, **__: {{"Id": "x"}},
    exec_start=lambda *_, **__: socket.SocketIO(ours, "rwb"),
    exec_inspect=lambda _: {{"ExitCode": 3}},
)
engine.connect = lambda _: SimpleNamespace(api=api)
runstate.choose = lambda run: "r-00000000"
threading.Thread(target=answer, daemon=True).start()
execute(["-i", "a", "--", "true"])
"""


@contextmanager
def _execute(reads: bool) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", COMMAND.format(reads=reads)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        yield process


@pytest.mark.parametrize("data", [b"", b"first part"])
def test_command_that_reads_no_input_ends_while_input_is_open(data: bytes) -> None:
    with _execute(reads=False) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(data)
        # The input remains open, so that the thread of the command that reads it waits.
        process.stdin.flush()
        out, errors = process.stdout.read(), process.stderr.read()
        assert (process.wait(timeout=30), out, errors.decode()) == (3, b"done\n", "")


def test_end_of_input_reaches_command() -> None:
    with _execute(reads=True) as process:
        # More than the buffers of pipe and socket.
        out, errors = process.communicate(b"x" * (1 << 20), timeout=30)
    assert (process.returncode, out, errors.decode()) == (3, b"done\n", "")
