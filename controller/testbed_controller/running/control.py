"""Commands by hand on a lab: `testbed fault`, `testbed link set`, the page of `testbed watch` and the Python API.

A run that goes on is asked over its control socket, a Unix socket beside its state file: it carries the command out and
has it among its events. A lab that stands without a run is changed by the command's own process. Requests and answers
are JSON, one line each; a request bears the token of the run and one of these keys:

    strike   an action, as a scenario writes it; ``handle`` may say how it is called
    undo     the handle of an action in force
    set      figures of links: ``pairs``, a ``part`` of a scenario, and ``direct`` fields of `Link`
    show     nothing: what is in force, and what every device is doing
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from testbed.common.errors import InputError, TestbedError
from testbed.faults.conditions import (
    DeviceState,
    FaultAction,
    FaultContext,
    RecordedStep,
    StateDiff,
    SystemState,
    apply_step,
)
from testbed.faults.device_actions import Kill, Pause, StateAction
from testbed.faults.link_actions import Flap
from testbed.faults.parts import ActionPart
from testbed.faults.script import FaultOperation
from testbed.network import checks
from testbed.network.link import Link, Pair, links_to_json
from testbed.network.parts import PRESETS, LinkPart, overlay
from testbed.scenario.loading import parse
from testbed_controller.hosts.lab import open_lab
from testbed_controller.lab import runstate
from testbed_controller.running.machines import DockerFaultTarget

Request = Mapping[str, Any]
Answer = dict[str, Any]
Record = Callable[[RecordedStep, StateDiff], None]
"""Takes a step that has been carried out, and what it changed."""

LONGEST = 1 << 20
"""Bytes of a request, at most."""


# What is asked


def answer(request: Request, containers: DockerFaultTarget, record: Record = lambda _step, _changed: None) -> Answer:
    """Carry out what a request asks of these containers; return ``text``, what it did, and more where there is more.

    Raises InputError where a scenario could not have it either, TestbedError where it fails.
    """
    if "show" in request:
        actions = {handle: f"{action.name} {action.target}" for handle, action in _in_force(containers).items()}
        return {"in_force": actions, "devices": dict(containers.states())}
    if "set" in request:
        links = LinkFigures.parsed(request["set"], containers.experiment.links)
        record(links, apply_step(links, containers))
        shown = containers.shown
        return {"links": links_to_json({pair: shown.link(pair) for pair in links.pairs})}
    if "undo" in request:
        handle, in_force = request["undo"], _in_force(containers)
        if handle not in in_force:
            raise InputError(f"'{handle}' is not in force; what is: {', '.join(in_force) or 'nothing'}")
        step = FaultOperation(in_force[handle], handle, "undo")
    else:
        step = _strike(request, containers)
    changed = apply_step(step, containers)
    if changed.devices or not step.switches:  # restarting a device that is up is no fault
        record(step, changed)
    return {"handle": step.handle, "text": _summary(step, changed, containers)}


def _in_force(containers: DockerFaultTarget) -> dict[str, FaultAction[Any]]:
    """Return the actions that `undo` can revert, by handle: those on links and speeds, and on states of devices."""
    actions = dict(containers.shown.in_force)
    for device, state in containers.states().items():
        if state in _CAUSES:
            action = _CAUSES[state](device)
            actions[_state_handle(action)] = action
    return actions


_CAUSES: Mapping[DeviceState, type[StateAction]] = {"down": Kill, "paused": Pause}


def _state_handle(action: FaultAction[Any]) -> str:
    """Return the handle of a change of state, such as ``pause:worker1``: a device has one state at a time."""
    return f"{action.name}:{action.target}"


def _strike(request: Request, containers: DockerFaultTarget) -> FaultOperation:
    """Check an action, and name it."""
    action = parse(ActionPart, request.get("strike", {})).action
    run = containers.experiment
    devices = [device.name for device in run.devices]
    for _, name in action.named():
        if name not in devices:
            raise InputError(f"there is no device '{name}' in {containers.run_id}: {', '.join(devices)}")
    for _, text in action.problems(FaultContext(run.devices, run.links, radio=run.radio)):
        raise InputError(text)
    if isinstance(action, StateAction):
        return FaultOperation(action, _state_handle(action))
    return FaultOperation(action, str(request.get("handle") or new_handle(action.name)))


def new_handle(action: str) -> str:
    """Return a name for an action that no other has."""
    return f"{action}-{secrets.token_hex(3)}"


def _summary(step: FaultOperation, changed: StateDiff, containers: DockerFaultTarget) -> str:
    """Say what an action changed."""
    action = step.action
    if action.switches:
        nothing = "" if changed.devices else f" is {containers.states()[action.target]}, nothing to do"
        return f"{action.name}: {action.target}{nothing}"
    links = [f"{len(changed.links)} directed links changed"] if changed.links or not changed.speeds else []
    speeds = [f"{name} computes at {factor:.4g} times its own speed" for name, factor in changed.speeds.items()]
    text = ", ".join(links + speeds)
    if action.undoes or step.phase == "undo":
        return text
    return f"{step.handle}: {text}; undo with: testbed fault undo {step.handle}"


@dataclass(frozen=True)
class LinkFigures:
    """Figures that links have from now on, under the faults in force."""

    pairs: Sequence[Pair]
    part: LinkPart
    direct: Mapping[str, Any]
    """What a part of a scenario cannot say, by field of `Link`."""
    switches: bool = False

    @staticmethod
    def parsed(given: Mapping[str, Any], links: Iterable[Pair]) -> LinkFigures:
        """Read a request's ``set``, which is about some of these links; raises `InputError` for what cannot be."""
        part = parse(LinkPart, given["part"])
        if part.preset is not None and part.preset not in PRESETS:
            raise InputError(f"there is no preset '{part.preset}': use one of {', '.join(PRESETS)}")
        pairs = [pair for ends in given["pairs"] for pair in choose(links, *ends)]
        return LinkFigures(pairs, part, {key: given["direct"][key] for key in ("rate", "up") if key in given["direct"]})

    def apply(self, now: SystemState) -> SystemState:
        """Return the conditions after it; raise InputError where a link would be one that cannot be."""
        return now.set_figures({pair: self._figures(pair, now) for pair in self.pairs})

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return nothing: the events of the links that change say it all."""
        return []

    def _figures(self, pair: Pair, now: SystemState) -> Link:
        wanted = replace(overlay(now.own_link(pair), self.part, now.from_first(pair)), **self.direct)
        if problems := checks.problems(wanted):
            raise InputError("; ".join(f"{pair[0]} -> {pair[1]}: {problem.text}" for problem in problems))
        return wanted


def choose(links: Iterable[Pair], source: str | None, destination: str | None) -> list[Pair]:
    """Return the links between these ends, any end where none is named; raise InputError where there is none."""
    chosen = [pair for pair in links if source in (None, pair[0]) and destination in (None, pair[1])]
    if not chosen:
        names = sorted({name for pair in links for name in pair})
        ends = f"from {source}" + (f" to {destination}" if destination else "")
        raise InputError(f"there is no link {ends}; the devices are {', '.join(names)}")
    return chosen


# Who is asked


def reach(run_id: str) -> Callable[[Request], Answer]:
    """Return what answers requests about a lab: the run that goes on there, or this process where there is none.

    Raises InputError where there is no such lab.
    """
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        _connected(run_id).close()
        token = runstate.read(run_id).token
        return lambda request: _ask(run_id, {**request, "token": token})
    containers = DockerFaultTarget(open_lab(run_id))
    return lambda request: answer(request, containers)


def strike(run_id: str, given: Mapping[str, object]) -> str:
    """Carry out an action, given as a scenario writes it, and say what it changed."""
    return str(reach(run_id)({"strike": dict(given)})["text"])


def flap(
    ask: Callable[[Request], Answer], part: Mapping[str, object], seconds: float | None
) -> Iterator[tuple[int, float]]:
    """Take links down and up from now on until it is over; they are up when this ends, however it ends.

    Yields after each change how often they went down so far, and by how many seconds the latest of the changes was
    late. ``seconds`` None is without end, unless the action says how often.
    """
    given, handle = {"flap": dict(part)}, new_handle(Flap.name)
    action = parse(ActionPart, given).action
    assert isinstance(action, Flap)
    began = time.monotonic()
    turns, late, down = 0, 0.0, False
    try:
        for phase, when in action.turns(0.0, math.inf if seconds is None else seconds):
            time.sleep(max(0.0, began + when - time.monotonic()))
            down = phase == "strike" or down
            ask({"strike": given, "handle": handle} if phase == "strike" else {"undo": handle})
            down = phase == "strike"
            turns, late = turns + down, max(late, time.monotonic() - began - when)
            yield turns, late
    except InputError:  # refused: nothing of it is in force
        down = False
        raise
    finally:
        if down:
            ask({"undo": handle})


# The socket


@contextlib.contextmanager
def serving(run_id: str, respond: Callable[[Request], Answer]) -> Iterator[None]:
    """Have requests to a run answered within the block, each in a thread of its own."""
    token = runstate.read(run_id).token

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            said: Answer
            try:
                request = json.loads(self.rfile.readline(LONGEST))
                if not hmac.compare_digest(str(request.pop("token", "")).encode(), token.encode()):
                    raise InputError("the token of the run is missing or wrong")
                said = respond(request)
            except TestbedError as error:
                said = {"error": str(error), "input": isinstance(error, InputError)}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the asker's to read, not the run's to die of
                said = {"error": f"{type(error).__name__}: {error}", "input": False}
            with contextlib.suppress(OSError):  # the asker has left
                self.wfile.write(json.dumps(said).encode() + b"\n")

    place = runstate.path_of(run_id).with_suffix(".sock")
    place.unlink(missing_ok=True)  # of a run on this lab that was killed
    with _short(run_id) as path:
        server = socketserver.ThreadingUnixStreamServer(path, Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.1,), name="control", daemon=True).start()
    try:
        yield
    finally:
        place.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _short(run_id: str) -> Iterator[str]:
    """Give the path of a run's socket in few letters: the kernel takes 107 at most."""
    path = runstate.path_of(run_id).with_suffix(".sock")
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _connected(run_id: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(run_id) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _ask(run_id: str, request: Request) -> Answer:
    try:
        with _connected(run_id) as connection, connection.makefile("rwb") as stream:
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            said: Answer = json.loads(stream.readline())
    except (OSError, ValueError):
        raise TestbedError(f"{run_id} is over: it did not answer") from None
    if "error" in said:
        raise (InputError if said["input"] else TestbedError)(said["error"])
    return said
