"""`testbed exec -i`: standard input, without an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# The engine's part: it answers "done" on standard output, closes the connection, and the command's status is 3.
_COMMAND = """
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
    command = [sys.executable, "-c", _COMMAND.format(reads=reads)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        yield process


@pytest.mark.parametrize("given", [b"", b"some, and more to come"])
def test_a_command_that_leaves_its_input_unread_ends_with_its_status_while_more_could_come(
    given: bytes,
) -> None:
    with _execute(reads=False) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(given)
        process.stdin.flush()  # and not closed: the thread that reads it waits for more
        out, complaint = process.stdout.read(), process.stderr.read()
        assert (process.wait(timeout=30), out, complaint.decode()) == (3, b"done\n", "")


def test_the_end_of_the_input_is_passed_on() -> None:
    with _execute(reads=True) as process:
        out, complaint = process.communicate(b"x" * (1 << 20), timeout=30)
    assert (process.returncode, out, complaint.decode()) == (3, b"done\n", "")
