"""Manual changes to a lab: `testbed fault`, `testbed link set`, the page of `testbed watch` and the Python API.

An active run receives commands over its control socket, a Unix socket beside its state file; the run executes the
command and records the events. In a lab without a run, the process of the command makes the change itself. Requests and
responses are one line of JSON each; a request has the token of the run and one of these keys:

    strike   an action, in the syntax of a scenario; ``handle`` optionally names the action
    undo     the handle of an active action
    set      link properties: ``pairs`` of devices, ``part`` with keys as in a scenario, and ``direct``, fields of
             `Link` without a key in scenarios
    show     no value; returns the active actions and the state of every device
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
from functools import partial
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
StepRecorder = Callable[[RecordedStep, StateDiff], None]
"""A function that records an executed step and the resulting changes."""

REQUEST_BYTES = 1 << 20
"""Maximum size of a request, in bytes."""


# Requests


def answer_request(
    request: Request,
    fault_target: DockerFaultTarget,
    record: StepRecorder = lambda _step, _changed: None,
) -> Answer:
    """Execute a request on the devices of a lab.

    The response to ``strike`` and ``undo`` has the ``handle`` of the action and a summary, ``text``; the response to
    ``set`` has the changed ``links``. Raises InputError for a request that would be invalid in a scenario, and
    TestbedError if the execution fails.
    Example::

        answer_request({"strike": {"kill": "worker1"}}, fault_target)
    """
    if "show" in request:
        actions = {}
        for handle, action in _active_actions(fault_target).items():
            actions[handle] = f"{action.name} {action.target}"
        return {"in_force": actions, "devices": dict(fault_target.states())}
    if "set" in request:
        step_links = LinkSettings.parse_request(
            request["set"], fault_target.experiment.links
        )
        record(step_links, apply_step(step_links, fault_target))
        state = fault_target.current
        links = {pair: state.link(pair) for pair in step_links.pairs}
        return {"links": links_to_json(links)}
    if "undo" in request:
        handle = request["undo"]
        active = _active_actions(fault_target)
        if handle not in active:
            raise InputError(
                f"no active fault '{handle}'; active: {', '.join(active) or 'none'}"
            )
        step = FaultOperation(active[handle], handle, "undo")
    else:
        step = _parse_strike(request, fault_target)
    changed = apply_step(step, fault_target)
    # A command may ask for the state that a device already has, such as a restart of a running device. Then there is
    # no fault to record.
    has_no_effect = step.switches and not changed.devices
    if not has_no_effect:
        record(step, changed)
    return {"handle": step.handle, "text": _summarise(step, changed, fault_target)}


def _active_actions(fault_target: DockerFaultTarget) -> dict[str, FaultAction[Any]]:
    """Return the revertible actions by handle."""
    actions = dict(fault_target.current.in_force)
    # The engine knows which devices are down or paused. A device may also have died by itself, and a restart undoes
    # this as it undoes a kill.
    for device, state in fault_target.states().items():
        if state in _ACTION_BY_STATE:
            action = _ACTION_BY_STATE[state](device)
            actions[_state_handle(action)] = action
    return actions


_ACTION_BY_STATE: Mapping[DeviceState, type[StateAction]] = {
    "down": Kill,
    "paused": Pause,
}
"""The action that leads to a state, for devices in this state."""


def _state_handle(action: FaultAction[Any]) -> str:
    """Return the handle of a state change, for example ``pause:worker1``.

    The handle needs no random part, since a device has one state at a time.
    """
    return f"{action.name}:{action.target}"


def _parse_strike(request: Request, fault_target: DockerFaultTarget) -> FaultOperation:
    """Validate an action and assign a handle."""
    action = parse(ActionPart, request.get("strike", {})).action
    run = fault_target.experiment
    devices = [device.name for device in run.devices]
    for _, name in action.named():
        if name not in devices:
            raise InputError(
                f"unknown device '{name}'; {fault_target.run_id} has {', '.join(devices)}"
            )
    context = FaultContext(run.devices, run.links, radio=run.radio)
    # The first problem is enough, since a request has a single action.
    for _, text in action.problems(context):
        raise InputError(text)
    if isinstance(action, StateAction):
        return FaultOperation(action, _state_handle(action))
    return FaultOperation(action, str(request.get("handle") or new_handle(action.name)))


def new_handle(action: str) -> str:
    """Return a unique handle for an action."""
    return f"{action}-{secrets.token_hex(3)}"


def _summarise(
    step: FaultOperation, changed: StateDiff, fault_target: DockerFaultTarget
) -> str:
    action = step.action
    if action.switches:
        if changed.devices:
            return f"{action.name}: {action.target}"
        state = fault_target.states()[action.target]
        return f"{action.name}: {action.target} is {state}, nothing to do"
    texts = []
    if changed.links or not changed.speeds:
        texts.append(f"{len(changed.links)} directed links changed")
    for name, factor in changed.speeds.items():
        texts.append(f"{name} computes at {factor:.4g} times its own speed")
    text = ", ".join(texts)
    if action.undoes or step.phase == "undo":
        return text
    return f"{step.handle}: {text}; undo with: testbed fault undo {step.handle}"


@dataclass(frozen=True)
class LinkSettings:
    """New link properties, which replace the properties in the scenario; active faults modify the new properties."""

    pairs: Sequence[Pair]
    part: LinkPart
    direct: Mapping[str, Any]
    """Fields of `Link` without a key in scenarios."""
    switches: bool = False

    @staticmethod
    def parse_request(
        request: Mapping[str, Any], links: Iterable[Pair]
    ) -> LinkSettings:
        """Parse the ``set`` value of a request; raises InputError if no link of ``links`` matches."""
        part = parse(LinkPart, request["part"])
        if part.preset is not None and part.preset not in PRESETS:
            raise InputError(
                f"unknown preset '{part.preset}'; available: {', '.join(PRESETS)}"
            )
        pairs = []
        for ends in request["pairs"]:
            pairs += choose_links(links, *ends)
        # All other fields of a link are keys of the part, which is checked; a request must not bypass the check.
        direct = {}
        for key in ("rate", "up"):
            if key in request["direct"]:
                direct[key] = request["direct"][key]
        return LinkSettings(pairs, part, direct)

    def apply(self, now: SystemState) -> SystemState:
        """Return the state after the change; raises InputError for an invalid link."""
        links = {pair: self._compute_link(pair, now) for pair in self.pairs}
        return now.with_links(links)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return no events: the events of the changed links suffice."""
        return []

    def _compute_link(self, pair: Pair, now: SystemState) -> Link:
        overlaid = overlay(now.own_link(pair), self.part, now.is_from_first(pair))
        link = replace(overlaid, **self.direct)
        problems = []
        for problem in checks.problems(link):
            problems.append(f"{pair[0]} -> {pair[1]}: {problem.text}")
        if problems:
            raise InputError("; ".join(problems))
        return link


def choose_links(
    links: Iterable[Pair], source: str | None, destination: str | None
) -> list[Pair]:
    """Return the links from ``source`` to ``destination``, where None matches any device.

    Raises InputError if no link matches.

    >>> choose_links([("a", "b"), ("b", "a"), ("b", "c")], "b", None)
    [('b', 'a'), ('b', 'c')]
    """
    matches = []
    for pair in links:
        if source in (None, pair[0]) and destination in (None, pair[1]):
            matches.append(pair)
    if not matches:
        names: set[str] = set()
        for pair in links:
            names.update(pair)
        ends = f"from {source}" + (f" to {destination}" if destination else "")
        raise InputError(f"no link {ends}; the devices are {', '.join(sorted(names))}")
    return matches


# Connections


def connect(run_id: str) -> Callable[[Request], Answer]:
    """Return a function sending a request to the active run of a lab and returning the response.

    In a lab without a run, the function executes requests in this process. Raises InputError for an unknown lab.
    """
    # Without an active run, the socket is missing, or refuses connections because a killed run left it behind.
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        _open_connection(run_id).close()
        token = runstate.read(run_id).token
        return lambda request: _send_request(run_id, {**request, "token": token})
    fault_target = DockerFaultTarget(open_lab(run_id))
    return lambda request: answer_request(request, fault_target)


def strike(run_id: str, action: Mapping[str, object]) -> str:
    """Execute an action in the syntax of a scenario, and return a summary."""
    return str(connect(run_id)({"strike": dict(action)})["text"])


def flap(
    send: Callable[[Request], Answer], part: Mapping[str, object], seconds: float | None
) -> Iterator[tuple[int, float]]:
    """Take links down and up in turns; the links are up at the end, even after an error.

    ``send`` sends a request to the lab (see `connect`), and ``part`` has the keys of ``flap`` in a scenario.

    Yields, after each change, the number of interruptions so far and the maximum lateness of a change in seconds.
    ``seconds`` is the total duration; None repeats without end unless the action has a count.
    """
    request = {"flap": dict(part)}
    handle = new_handle(Flap.name)
    action = parse(ActionPart, request).action
    assert isinstance(action, Flap)
    duration = math.inf if seconds is None else seconds
    start = time.monotonic()
    interruptions = 0
    lateness = 0.0
    may_be_down = False
    try:
        for phase, when in action.turns(0.0, duration):
            time.sleep(max(0.0, start + when - time.monotonic()))
            if phase == "strike":
                # Set before the request, since an interruption during the request may leave the links down.
                may_be_down = True
                send({"strike": request, "handle": handle})
                interruptions += 1
            else:
                send({"undo": handle})
                may_be_down = False
            lateness = max(lateness, time.monotonic() - start - when)
            yield interruptions, lateness
    except InputError:  # the run refused the action, so no link is down
        may_be_down = False
        raise
    finally:
        if may_be_down:
            send({"undo": handle})


# The socket


@contextlib.contextmanager
def serve_requests(run_id: str, respond: Callable[[Request], Answer]) -> Iterator[None]:
    """Answer requests to a run within the block, each in a separate thread."""
    token = runstate.read(run_id).token

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            response: Answer
            try:
                request = json.loads(self.rfile.readline(REQUEST_BYTES))
                sent = str(request.pop("token", "")).encode()
                # A comparison in constant time, because its duration must not reveal the token.
                if not hmac.compare_digest(sent, token.encode()):
                    raise InputError("the token of the run is missing or wrong")
                response = respond(request)
            except TestbedError as error:
                response = {"error": str(error), "input": isinstance(error, InputError)}
            except Exception as error:  # noqa: BLE001 - reported to the client; a bad request must not end the run
                response = {"error": f"{type(error).__name__}: {error}", "input": False}
            with contextlib.suppress(OSError):  # the client has disconnected
                self.wfile.write(json.dumps(response).encode() + b"\n")

    socket_file = runstate.path_of(run_id).with_suffix(".sock")
    socket_file.unlink(
        missing_ok=True
    )  # a killed run on this lab leaves its socket behind
    with _short_path(run_id) as path:
        server = socketserver.ThreadingUnixStreamServer(path, Handler)
    # A request that hangs must not keep the run from ending.
    server.daemon_threads = True
    serve = partial(server.serve_forever, poll_interval=0.1)
    threading.Thread(target=serve, name="control", daemon=True).start()
    try:
        yield
    finally:
        socket_file.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _short_path(run_id: str) -> Iterator[str]:
    """Yield a short path of a run's socket, because the kernel accepts at most 107 characters."""
    path = runstate.path_of(run_id).with_suffix(".sock")
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _open_connection(run_id: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(run_id) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _send_request(run_id: str, request: Request) -> Answer:
    try:
        with (
            _open_connection(run_id) as connection,
            connection.makefile("rwb") as stream,
        ):
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            response: Answer = json.loads(stream.readline())
    except (OSError, ValueError):
        raise TestbedError(f"the run {run_id} does not respond: it has ended") from None
    if "error" in response:
        kind = InputError if response["input"] else TestbedError
        raise kind(response["error"])
    return response
