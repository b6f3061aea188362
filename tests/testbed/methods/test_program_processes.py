"""Output and processes of a user's program on this machine: any output is recorded, and no process outlives a run."""

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


class RecordingDevice:
    """A device with a list of recorded events."""

    name = "stage1"

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def output_lines(self) -> list[str]:
        return [fields["text"] for event, fields in self.events if event == "output"]


def run_python(code: str, seconds: float = 20.0) -> RecordingDevice:
    """Run Python code as the program of a device. Raises TimeoutError after a number of seconds."""
    problem = prepare(trials(load(EXAMPLE, []))[0]).problem
    command = [sys.executable, "-c", textwrap.dedent(code)]
    part = problem.workload.programs["stage"].model_copy(
        update={"command": command, "files": []}
    )
    workload = problem.workload.model_copy(update={"programs": {"stage": part}})
    changed_problem = program.replace(problem, workload=workload)
    device = RecordingDevice()
    execution = execute(
        cast(Device, device), changed_problem, ["stage1", "stage2", "stage3"]
    )
    asyncio.run(asyncio.wait_for(execution, seconds))
    return device


def start_process(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask_for_number(process: subprocess.Popen[str]) -> str:
    """Send a line to a process waiting for input; return the next line of output."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@contextlib.contextmanager
def kill_afterwards(process: subprocess.Popen[str]) -> Iterator[None]:
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


def test_last_state_of_progress_bar_is_recorded() -> None:
    # 30,000 states of 90 bytes, each overwriting the previous one on a terminal.
    device = run_python(
        """
        import sys
        for number in range(30_000):
            sys.stderr.write(f"\\r{number:6}/30000 [" + "#" * 75 + "]")
        print("done", file=sys.stderr)
        """
    )
    assert device.output_lines() == [" 29999/30000 [" + "#" * 75 + "]done"]


def test_very_long_line_is_recorded_completely_in_parts() -> None:
    device = run_python(
        "import sys; sys.stdout.write('y' * 5_000_000); sys.stdout.write('\\nlast')"
    )
    *parts, last = device.output_lines()
    assert "".join(parts) == "y" * 5_000_000
    assert max(map(len, parts)) <= program.LONGEST + program.CHUNK
    assert last == "last"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_do_not_depend_on_chunk_size(size: int) -> None:
    text = b"one\r\ntwo\n\n 10%\r 20%\r100%\nthree\r\r\nrest"
    splitter = LineSplitter()
    lines: list[str] = []
    for start in range(0, len(text), size):
        lines += splitter.split(text[start : start + size])
    lines += splitter.finish()
    # A carriage return that no newline follows discards the beginning of its line.
    assert lines == ["one", "two", "", "100%", "three", "rest"]


DAEMON = """
import os, pathlib, time
# Fork twice with a new session: the second child is no longer a descendant of the program.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path({pid_file!r}).write_text(str(os.getpid()))
        {keep}
        time.sleep(600)
    os._exit(0)
while not os.path.exists({pid_file!r}) or not pathlib.Path({pid_file!r}).read_text():
    time.sleep(0.01)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "keep",
    ["pass", "os.close(1); os.close(2)"],
    ids=["keeps its output", "closes its output"],
)
def test_daemon_is_killed_when_program_ends(tmp_path: Path, keep: str) -> None:
    pid_file = str(tmp_path / "pid")
    device = run_python(DAEMON.format(pid_file=pid_file, keep=keep))
    assert device.events[-2:] == [
        ("output", {"stream": "stdout", "text": "done"}),
        ("exit", {"status": 0}),
    ]
    assert not is_running(int(Path(pid_file).read_text()))


def test_stopped_program_ends_with_all_descendants(tmp_path: Path) -> None:
    pid_file = str(tmp_path / "pid")
    daemon = DAEMON.format(pid_file=pid_file, keep="pass")
    with pytest.raises(TimeoutError):
        run_python(daemon + "time.sleep(600)", seconds=1.5)
    assert not is_running(int(Path(pid_file).read_text()))


def test_other_children_of_agent_survive_end_of_program() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    try:
        run_python("print(1)")
        # No child has changed its state.
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


KILL_ITSELF = "import os; os.kill(os.getpid(), 9)"


def test_kill_by_kernel_for_lack_of_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The kernel's count of kills in the container is 3 before the program and 4 afterwards.
    counts = iter((3, 4))
    monkeypatch.setattr(program, "count_memory_kills", lambda: next(counts))
    with pytest.raises(
        TestbedError,
        match=r"ended with signal SIGKILL.*ran out of memory: its container has",
    ):
        run_python(KILL_ITSELF)


def test_other_kill_is_not_attributed_to_memory() -> None:
    with pytest.raises(TestbedError, match=r"ended with signal SIGKILL: no output$"):
        run_python(KILL_ITSELF)


@pytest.mark.parametrize("name", ["localhost", "ip6-loopback"])
def test_host_names_of_loopback_are_rejected_as_device_names(name: str) -> None:
    with pytest.raises(InputError, match=f"devices.{name}: this name is reserved"):
        prepare(trials(load(EXAMPLE, [f"devices.{name}={{}}"]))[0])


def test_children_of_processes_before_program_survive() -> None:
    with (
        start_process("read line; sleep 60 & echo $!; wait") as earlier,
        kill_afterwards(earlier),
    ):
        tree = ProcessTree()
        # The process started before the tree, its child afterwards.
        helper = int(ask_for_number(earlier))
        with start_process("exec sleep 60") as started:
            tree.kill(started.pid)
            assert started.wait() == -signal.SIGKILL
        assert is_running(helper)
        os.kill(helper, signal.SIGKILL)


def test_process_that_ended_is_forgotten() -> None:
    with start_process("read line") as earlier:
        tree = ProcessTree()
        ask_for_number(earlier)
        earlier.wait()
    tree.collect_orphans(0)
    assert earlier.pid not in tree._earlier


def test_process_that_survives_sigkill_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.0)
    tree = ProcessTree()
    with start_process("exec sleep 60") as started:
        with monkeypatch.context() as patch:
            # A kill without effect, as of a process that waits for a device in the kernel.
            patch.setattr(os, "kill", lambda pid, number: None)
            tree.kill(started.pid)
        started.kill()
    assert f"processes {started.pid} of the program survive SIGKILL" in caplog.text
