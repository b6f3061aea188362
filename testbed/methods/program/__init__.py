"""The user's own programs: a command on each device, with the same links, faults, measurements and events as methods.

Only containers run commands. A command takes as long as on the host, not the charged time of an emulated device: only
`cpus` and `memory` limit its processors and memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testbed.common import formats
from testbed.common.errors import InputError, TestbedError
from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.method import Method, Options, PlanningProblem, ProgramContext
from testbed.methods.program.processes import ProcessTree, count_memory_kills
from testbed.methods.program.workload import (
    ProgramPart,
    ProgramsProblem,
    ProgramWorkloadPart,
    by_device,
)
from testbed.plan import Assignment, Plan
from testbed.trace.events import EVENTS, EventType
from testbed.trace.metrics_spec import MetricsSpec, Row
from testbed.trace.rounds import ROUND, ROUND_TIME

PORT = 29500
"""Port at which the processes of torch.distributed meet by default."""
_LAST_LINES = 5
"""Number of output lines quoted in the error of a failed program."""
LONGEST = 1 << 20
"""Maximum bytes of a recorded line; a longer line is recorded as several."""
CHUNK = 1 << 16
"""Bytes of output read at a time."""
_COLLECT_SECONDS = 1.0
"""Seconds between two searches for exited orphans."""
_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "step": (("step",), ("loss", "samples")),
    "evaluate": (("step",), ("accuracy", "loss")),
    "request": (("request", "latency"), ()),
    "round": (("round",), ("start", "duration")),
}
"""Required and optional numeric fields of the events that metrics are computed from."""
_HIDDEN = ("TESTBED_TOKEN",)
"""Environment variables of the agent that programs must not see: the token authorises requests to the agent."""


@dataclass(frozen=True)
class Ended(TypedMessage, kind="ended", key=("sender",)):
    """Message to the coordinator: the device's program has ended with status 0."""


class Program(Method[Options]):
    """Run the commands of `workload.programs` until all except background commands have ended.

    A command that ends with another status than 0 fails the run. On a device that restarts, the command begins again.
    """

    name = "program"
    summary = (
        "user programs, `workload.programs`, on the devices and links of the testbed"
    )
    tasks = ("program",)
    needs_torch = False
    declared = MetricsSpec(
        events=(
            EventType(
                "output", "line of output of a program", None, ("stream", "text")
            ),
            EventType("exit", "end of a program", (), ("status",)),
            ROUND,
        ),
        metrics=(ROUND_TIME,),
        rows=(
            Row(
                "Sent",
                "{wire_bytes}",
                "by all devices, as their kernels count; which link carried it is not known",
            ),
        ),
    )

    def plan(self, problem: PlanningProblem[Options]) -> Plan:
        """Choose the coordinator, which collects the ends of all programs.

        The coordinator needs links to all devices whose programs end. Raises `InputError` if no device has these links,
        or if no program ends.
        """
        programs = _programs_by_device(problem)
        ending = [name for name, part in programs.items() if not part.background]
        if not ending:
            raise InputError(
                "all programs stay in the background, so the run would end at once: remove `background` from one",
                ("programs",),
            )
        names = [device.name for device in problem.devices]
        # In the order of preference: a device whose program ends waits for one program less.
        for candidate in (*ending, *programs, *names):
            if _is_linked(problem, candidate, ending):
                break
        else:
            raise InputError(
                "one device must have links with all devices whose programs end, to know the end of the run: add links "
                f"or write `background: true` for some of {', '.join(ending)}",
                ("programs",),
            )
        assignments = tuple(
            Assignment(device=name, start=0, stop=0, memory=0) for name in programs
        )
        return Plan(method=self.name, coordinator=candidate, assignments=assignments)

    def facts(
        self, problem: PlanningProblem[Options], plan: Plan, device: str
    ) -> tuple[PlanningProblem[Options], Plan]:
        """Return the problem with only the files of the device's own program, and the device's part of the plan."""
        own, part = super().facts(problem, plan, device)
        program = _programs_by_device(problem).get(device)
        assert isinstance(own, ProgramsProblem)
        names = program.files if program is not None else ()
        return replace(own, files={name: own.files[name] for name in names}), part

    async def program(self, device: Device, context: ProgramContext[Options]) -> None:
        """Run the device's command, if any; the coordinator then waits for all others."""
        programs = _programs_by_device(context.problem)
        async with Mailbox(device, context.problem.links, (Ended,)) as mailbox:
            part = programs.get(device.name)
            if part is not None:
                work = mailbox.start(execute(device, context.problem, [*programs]))
                if not part.background:
                    await work
            if device.name != context.plan.coordinator:
                if part is not None and not part.background:
                    await mailbox.post(context.plan.coordinator, Ended())
                # The run ends with the coordinator's program; a return here would count as a failure.
                await asyncio.Event().wait()
            for name, part in programs.items():
                if name != device.name and not part.background:
                    await mailbox.take(Ended, name)


def _programs_by_device(problem: PlanningProblem[Options]) -> dict[str, ProgramPart]:
    assert isinstance(problem.workload, ProgramWorkloadPart)
    return by_device(
        problem.workload.programs, [device.name for device in problem.devices]
    )


def _is_linked(
    problem: PlanningProblem[Options], device: str, others: Sequence[str]
) -> bool:
    for other in others:
        if other == device:
            continue
        if not {(device, other), (other, device)} <= problem.links.keys():
            return False
    return True


def environment(
    problem: PlanningProblem[Options], device: str, names: list[str]
) -> dict[str, str]:
    """Return the environment variables of a program, added to the scenario's variables.

    `torch.distributed` reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; ranks are in the order of
    the devices that have programs.
    """
    return {
        "RANK": str(names.index(device)),
        "WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": names[0],
        "MASTER_PORT": str(PORT),
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",
        **_programs_by_device(problem)[device].environment,
    }


async def execute(
    device: Device, problem: PlanningProblem[Options], names: list[str]
) -> None:
    """Run the command of a device, then end all processes. Raises `TestbedError` for a failed command."""
    assert isinstance(problem, ProgramsProblem)
    part = _programs_by_device(problem)[device.name]
    inherited = dict(os.environ)
    for name in _HIDDEN:
        inherited.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        _place_files(Path(folder), {name: problem.files[name] for name in part.files})
        tree = ProcessTree()
        # The kernel counts since the container's start, so earlier runs of the program are subtracted.
        killed_before = count_memory_kills()
        try:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                cwd=folder,
                env={**inherited, **environment(problem, device.name, names)},
                stdout=PIPE,
                stderr=PIPE,
            )
        except OSError as error:
            raise TestbedError(
                f"{part.command[0]} cannot be run: {error.strerror}"
            ) from None
        status, last_lines = await _follow_output(device, process, tree)
    device.record("exit", status=status)
    if status != 0:
        command = " ".join(part.command)
        reason = last_lines or "no output"
        text = f"{command} ended with {_describe_status(status)}: {reason}"
        if count_memory_kills() > killed_before:
            limit = formats.size(problem.device(device.name).memory)
            text += f"; the device ran out of memory: its container has {limit}: increase `memory` of the device"
        raise TestbedError(text)


def _describe_status(status: int) -> str:
    # asyncio reports a process that a signal has ended by the negative number of the signal.
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def _place_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        place = folder / Path(name).name
        place.write_bytes(content)
        # Executable, since a command may be one of the files.
        place.chmod(0o555)


async def _follow_output(
    device: Device, process: Process, tree: ProcessTree
) -> tuple[int, str]:
    """Record a program's output until the end; return the exit status and the last lines of stderr.

    The program's descendants are killed at its end or on cancellation, since they may keep pipes open and ports
    occupied.
    """
    last_errors: deque[str] = deque(maxlen=_LAST_LINES)

    async def follow(stream: asyncio.StreamReader, name: str) -> None:
        lines = LineSplitter()
        while chunk := await stream.read(CHUNK):
            for text in lines.split(chunk):
                record(text, name)
        for text in lines.finish():
            record(text, name)

    def record(text: str, name: str) -> None:
        # Also in the container's own log.
        print(text, file=sys.stderr if name == "stderr" else sys.stdout, flush=True)
        # Python underlines the failed expression in a separate line, which is omitted.
        if name == "stderr" and text.strip(" ^~"):
            last_errors.append(text.strip())
        fields = parse_event(text)
        if fields is None:
            device.record("output", stream=name, text=text)
        else:
            device.record(fields.pop("event"), **fields)

    assert process.stdout is not None
    assert process.stderr is not None
    streams = {"stdout": process.stdout, "stderr": process.stderr}
    readers = [
        asyncio.create_task(follow(stream, name)) for name, stream in streams.items()
    ]
    collecting = asyncio.create_task(_collect_orphans(tree, process.pid))
    try:
        # `Process.wait` waits for the ends of both pipes as well in some versions of Python.
        await asyncio.to_thread(_await_end, process.pid)
    finally:
        collecting.cancel()
        # `Process.kill` would consume the exit status of an ended process, which asyncio has to read.
        tree.kill(process.pid)
    for reader in readers:
        await reader
    return await process.wait(), " | ".join(last_errors)


async def _collect_orphans(tree: ProcessTree, program: int) -> None:
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        tree.collect_orphans(program)


def _await_end(pid: int) -> None:
    # No such child: the process has ended, and asyncio has collected its status.
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class LineSplitter:
    """Splits the output of a program into lines.

    A line redrawn after carriage returns, such as a progress bar, counts once, in its last state.

    >>> splitter = LineSplitter()
    >>> list(splitter.split(b"10%\\r90%\\ndone")), list(splitter.finish())
    (['90%'], ['done'])
    """

    def __init__(self) -> None:
        self._rest = b""
        """Bytes of the incomplete last line."""

    def split(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines completed by more output; a line longer than `LONGEST` bytes is split."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        yield from map(_decode_line, lines)
        # Carriage returns at the end may belong to a line's end.
        visible = len(rest.rstrip(b"\r"))
        # Earlier states of a redrawn line are dropped now: a progress bar may never end its line.
        start = rest.rfind(b"\r", 0, visible) + 1
        self._rest = rest[start:]
        if len(self._rest) > LONGEST:
            yield from self.finish()

    def finish(self) -> Iterator[str]:
        """Yield the incomplete last line, if any."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _decode_line(rest)


def _decode_line(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _has_numbers(
    fields: Mapping[str, Any], needed: Sequence[str], optional: Sequence[str]
) -> bool:
    """Return whether the needed fields are finite numbers, and the optional ones numbers if present."""
    for key in needed:
        value = fields.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
    # A loss may be NaN: the run has diverged, which the report shows.
    return all(isinstance(fields.get(key, 0), int | float) for key in optional)


def parse_event(line: str) -> dict[str, Any] | None:
    """Parse a line as an event; None for other text.

    Events in ``_NUMBERS`` feed metrics and require numbers. Names reserved for the testbed are not accepted from
    programs.

    >>> parse_event('{"event": "step", "step": 3.0, "time": 12}')
    {'event': 'step', 'step': 3}
    """
    # Most lines of a program are not JSON.
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    name = fields["event"]
    reserved = {event.name for event in (*EVENTS, *Program.declared.events)}
    needed, optional = _NUMBERS.get(name, ((), ()))
    if name in reserved and not needed:
        return None
    if not _has_numbers(fields, needed, optional):
        return None
    # A program may write a whole number as 3.0; the search for missing steps needs integers.
    if needed:
        fields[needed[0]] = int(fields[needed[0]])
    # The device records its own time and name.
    for key in ("time", "device"):
        fields.pop(key, None)
    return fields
