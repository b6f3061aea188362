"""Commands by hand: over the control socket of a run that goes on, or on a lab that stands."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from testbed.common.errors import InputError, TestbedError
from testbed.faults.conditions import RecordedStep, StateDiff
from testbed_controller.api import live
from testbed_controller.lab import runstate
from testbed_controller.lab.lab import Lab
from testbed_controller.running import control
from testbed_controller.running.machines import DockerFaultTarget, step_events
from tests.helpers.recording_lab import RecordingLab

RUN = "run-1"


class Run:
    """A run that goes on and has what was done by hand among its events."""

    def __init__(self, lab: RecordingLab) -> None:
        self.containers = DockerFaultTarget(cast(Lab, lab))
        self.events: list[tuple[str, dict[str, Any]]] = []

    def respond(self, request: control.Request) -> control.Answer:
        return control.answer(request, self.containers, self.record)

    def record(self, step: RecordedStep, changed: StateDiff) -> None:
        self.events += step_events(step, changed, dict.fromkeys("abc", 1e9))


@pytest.fixture
def run(lab: RecordingLab) -> Iterator[Run]:
    runstate.write(runstate.RunState(run=RUN, token="secret"))
    made = Run(lab)
    with control.serve_requests(RUN, made.respond):
        yield made


def test_active_run_executes_commands_and_records_events(
    run: Run, lab: RecordingLab
) -> None:
    ask = control.connect(RUN)
    said = ask({"strike": {"throttle": {"device": "b", "slowdown": 2}}})
    assert run.events == [
        ("fault", {"action": "throttle", "target": "b", "phase": "strike"}),
        ("speed", {"target": "b", "factor": 0.5, "speed": 5e8}),
    ]
    assert ask({"show": None}) == {
        "in_force": {said["handle"]: "throttle b"},
        "devices": dict.fromkeys("abc", "up"),
    }
    assert (
        ask({"undo": said["handle"]})["text"] == "b computes at 1 times its own speed"
    )
    assert control.strike(RUN, {"kill": "b"}) == "kill: b"
    assert (lab.actions, ask({"show": None})["devices"]["b"]) == (["kill b"], "down")


def test_python_interface_reads_a_run_and_strikes(run: Run, lab: RecordingLab) -> None:
    found = live()
    handle = found.strike(partition=[["a"], ["b", "c"]])
    assert found.state()["in_force"] == {handle: "partition a | b,c"}
    found.undo(handle)
    assert lab.shaped == lab.experiment.links
    assert [fields["phase"] for event, fields in run.events if event == "fault"] == [
        "strike",
        "undo",
    ]
    with pytest.raises(InputError, match="unknown device 'z'"):
        found.strike(kill="z")


def test_undo_reverts_kills_and_pauses(run: Run, lab: RecordingLab) -> None:
    active = live()
    for action, device in (("pause", "b"), ("kill", "c")):
        handle = active.strike(**{action: device})
        assert active.state()["in_force"] == {handle: f"{action} {device}"}
        active.undo(handle)
        assert active.state()["devices"][device] == "up"
        with pytest.raises(InputError, match="no active fault"):
            active.undo(handle)


def test_restarting_a_device_that_is_up_is_no_fault(run: Run) -> None:
    live().strike(restart="b")
    assert run.events == []


def test_a_flap_by_hand_is_two_events_a_turn_and_its_links_are_up_at_the_end(
    run: Run, lab: RecordingLab
) -> None:
    part = {"between": ["a", "b"], "down": "20ms", "up": "30ms"}
    endless = cast(Any, control.flap(control.connect(RUN), part, None))
    assert [next(endless)[0] for _ in range(3)] == [1, 1, 2]
    assert not lab.shaped["a", "b"].up
    endless.close()
    assert lab.shaped == lab.experiment.links
    assert [fields["phase"] for event, fields in run.events if event == "fault"] == [
        "strike",
        "undo",
    ] * 2


def test_failed_command_is_reported_and_the_run_continues(
    run: Run, lab: RecordingLab
) -> None:
    ask = control.connect(RUN)
    with pytest.raises(InputError, match="unknown device 'z'; run-1 has a, b, c"):
        ask({"strike": {"kill": "z"}})
    with pytest.raises(InputError, match="no active fault 'it'"):
        ask({"undo": "it"})
    lab.refuses_links = True
    with pytest.raises(TestbedError, match="the rule did not take"):
        ask({"strike": {"partition": [["a"], ["b", "c"]]}})
    assert run.events == []
    assert ask({"strike": {"kill": "a"}})["text"] == "kill: a"


@pytest.mark.parametrize(
    "line",
    [
        b'{"show": null}',
        b'{"show": null, "token": "wrong"}',
        b"[]",
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
)
def test_request_without_token_or_with_nonsense_is_refused(
    run: Run, line: bytes
) -> None:
    with control._connect(RUN) as connection, connection.makefile("rwb") as stream:
        stream.write(line + b"\n")
        stream.flush()
        connection.shutdown(socket.SHUT_WR)
        assert "error" in json.loads(stream.readline())
    assert "devices" in control.connect(RUN)({"show": None})


def test_once_the_run_is_over_a_lab_that_stands_is_changed_directly(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    runstate.write(runstate.RunState(run=RUN, token="secret"))
    monkeypatch.setattr(Lab, "open", lambda _run: lab)
    made = Run(lab)
    with control.serve_requests(RUN, made.respond):
        ask = control.connect(RUN)
        ask({"strike": {"kill": "b"}})
    with pytest.raises(TestbedError, match="run run-1 does not respond"):
        ask({"strike": {"restart": "b"}})
    assert control.strike(RUN, {"restart": "b"}) == "restart: b"
    assert lab.actions == ["kill b", "start b"]
    assert [fields["action"] for _, fields in made.events] == ["kill"]


def test_socket_of_a_killed_run_is_ignored(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    runstate.write(runstate.RunState(run=RUN, token="secret"))
    with control._short_path(RUN) as path, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    monkeypatch.setattr(Lab, "open", lambda _run: lab)
    assert control.strike(RUN, {"kill": "b"}) == "kill: b"
    with control.serve_requests(RUN, Run(lab).respond):
        assert control.strike(RUN, {"restart": "b"}) == "restart: b"


def test_a_state_folder_with_a_long_name_has_sockets_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lab: RecordingLab
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 120)))
    runstate.write(runstate.RunState(run=RUN, token="secret"))
    with control.serve_requests(RUN, Run(lab).respond):
        assert control.strike(RUN, {"kill": "c"}) == "kill: c"
