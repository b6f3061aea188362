"""What a user's program writes and starts, on this machine: no output stops a run, and no process outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from testbed.common.errors import InputError, TestbedError
from testbed.device import Device
from testbed.methods import program
from testbed.methods.program import LineSplitter, execute, processes
from testbed.methods.program.processes import ProcessTree
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from tests.helpers import ROOT

EXAMPLE = ROOT / "scenarios" / "examples" / "programs.yaml"


class Recording:
    """A device that keeps the events of its program."""

    name = "stage1"

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def lines(self) -> list[str]:
        return [fields["text"] for event, fields in self.events if event == "output"]


def run(code: str, seconds: float = 20.0) -> Recording:
    """Run a program of Python on a device; raises TimeoutError where it does not end."""
    problem = prepare(trials(load(EXAMPLE, []))[0]).problem
    command = [sys.executable, "-c", textwrap.dedent(code)]
    part = problem.workload.programs["stage"].model_copy(
        update={"command": command, "files": []}
    )
    workload = problem.workload.model_copy(update={"programs": {"stage": part}})
    device = Recording()
    changed = program.replace(problem, workload=workload)
    names = ["stage1", "stage2", "stage3"]
    asyncio.run(
        asyncio.wait_for(execute(cast(Device, device), changed, names), seconds)
    )
    return device


def start_process(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask_for_number(process: subprocess.Popen[str]) -> str:
    """Let a process that reads a line continue, and return the line that it prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@contextlib.contextmanager
def ended_afterwards(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_progress_bar_of_megabytes_leaves_its_last_state() -> None:
    device = run(
        """
        import sys
        for number in range(30_000):
            sys.stderr.write(f"\\r{number:6}/30000 [" + "#" * 75 + "]")
        print("done", file=sys.stderr)
        """
    )
    assert device.lines() == [" 29999/30000 [" + "#" * 75 + "]done"]


def test_a_line_of_many_megabytes_is_recorded_in_parts_of_which_nothing_is_lost() -> (
    None
):
    device = run(
        "import sys; sys.stdout.write('y' * 5_000_000); sys.stdout.write('\\nlast')"
    )
    *parts, last = device.lines()
    assert "".join(parts) == "y" * 5_000_000
    assert max(map(len, parts)) <= program.LONGEST + program.CHUNK
    assert last == "last"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_output_is_cut(size: int) -> None:
    text = b"one\r\ntwo\n\n 10%\r 20%\r100%\nthree\r\r\nrest"
    lines = LineSplitter()
    found = [
        line
        for at in range(0, len(text), size)
        for line in lines.split(text[at : at + size])
    ]
    assert [*found, *lines.finish()] == ["one", "two", "", "100%", "three", "rest"]


DAEMON = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path({place!r}).write_text(str(os.getpid()))
        {keep}
        time.sleep(600)
    os._exit(0)
while not os.path.exists({place!r}) or not pathlib.Path({place!r}).read_text():
    time.sleep(0.01)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "keep",
    ["pass", "os.close(1); os.close(2)"],
    ids=["keeps its output", "closes its output"],
)
def test_a_daemon_ends_with_its_program(tmp_path: Path, keep: str) -> None:
    place = str(tmp_path / "pid")
    device = run(DAEMON.format(place=place, keep=keep))
    assert device.events[-2:] == [
        ("output", {"stream": "stdout", "text": "done"}),
        ("exit", {"status": 0}),
    ]
    assert not is_running(int(Path(place).read_text()))


def test_stopped_program_ends_with_all_descendants(tmp_path: Path) -> None:
    place = str(tmp_path / "pid")
    with pytest.raises(TimeoutError):
        run(DAEMON.format(place=place, keep="pass") + "time.sleep(600)", seconds=1.5)
    assert not is_running(int(Path(place).read_text()))


def test_other_children_of_the_process_live_on() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    try:
        run("print(1)")
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_kill_for_want_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((3, 4))
    monkeypatch.setattr(program, "count_memory_kills", lambda: next(counts))
    with pytest.raises(
        TestbedError,
        match=r"ended with signal SIGKILL.*ran out of memory: its container is held to",
    ):
        run("import os; os.kill(os.getpid(), 9)")


def test_a_kill_by_somebody_else_is_not_taken_for_want_of_memory() -> None:
    with pytest.raises(TestbedError, match=r"ended with signal SIGKILL: no output$"):
        run("import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("name", ["localhost", "ip6-loopback"])
def test_names_of_a_containers_own_addresses_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"devices.{name}: this name is reserved"):
        prepare(trials(load(EXAMPLE, [f"devices.{name}={{}}"]))[0])


def test_children_of_earlier_processes_outlive_the_program() -> None:
    with (
        start_process("read line; sleep 60 & echo $!; wait") as earlier,
        ended_afterwards(earlier),
    ):
        tree = ProcessTree()
        helper = int(ask_for_number(earlier))
        with start_process("exec sleep 60") as started:
            tree.kill(started.pid)
            assert started.wait() == -signal.SIGKILL
        assert is_running(helper)
        os.kill(helper, signal.SIGKILL)


def test_numbers_of_ended_earlier_processes_are_forgotten() -> None:
    with start_process("read line") as earlier:
        tree = ProcessTree()
        ask_for_number(earlier)
        earlier.wait()
    tree.collect_orphans(0)
    assert earlier.pid not in tree._earlier


def test_process_that_survives_its_kill_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.0)
    tree = ProcessTree()
    with start_process("exec sleep 60") as started:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: None)
            tree.kill(started.pid)
        started.kill()
    assert f"processes {started.pid} of the program survive SIGKILL" in caplog.text
