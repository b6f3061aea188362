"""Manual commands, over the control socket of an active run or to a lab without a run."""

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


class FakeRun:
    """An active run, which executes commands and records events."""

    def __init__(self, lab: RecordingLab) -> None:
        self.fault_target = DockerFaultTarget(cast(Lab, lab))
        self.events: list[tuple[str, dict[str, Any]]] = []

    def respond(self, request: control.Request) -> control.Answer:
        return control.answer_request(request, self.fault_target, self.record)

    def record(self, step: RecordedStep, changed: StateDiff) -> None:
        speeds = dict.fromkeys("abc", 1e9)
        self.events += step_events(step, changed, speeds)

    def fault_phases(self) -> list[str]:
        return [fields["phase"] for event, fields in self.events if event == "fault"]


def write_run_state() -> None:
    runstate.write(runstate.RunState(run=RUN, token="secret"))


@pytest.fixture
def run(lab: RecordingLab) -> Iterator[FakeRun]:
    write_run_state()
    active_run = FakeRun(lab)
    with control.serve_requests(RUN, active_run.respond):
        yield active_run


def test_active_run_executes_commands_and_records_events(
    run: FakeRun, lab: RecordingLab
) -> None:
    ask = control.connect(RUN)
    answer = ask({"strike": {"throttle": {"device": "b", "slowdown": 2}}})
    handle = answer["handle"]
    assert run.events == [
        ("fault", {"action": "throttle", "target": "b", "phase": "strike"}),
        ("speed", {"target": "b", "factor": 0.5, "speed": 5e8}),
    ]
    assert ask({"show": None}) == {
        "in_force": {handle: "throttle b"},
        "devices": dict.fromkeys("abc", "up"),
    }
    reverted = ask({"undo": handle})
    assert reverted["text"] == "b computes at 1 times its own speed"
    assert control.strike(RUN, {"kill": "b"}) == "kill: b"
    assert lab.actions == ["kill b"]
    assert ask({"show": None})["devices"]["b"] == "down"


def test_python_interface_applies_and_reverts_faults(
    run: FakeRun, lab: RecordingLab
) -> None:
    active = live()
    handle = active.strike(partition=[["a"], ["b", "c"]])
    assert active.state()["in_force"] == {handle: "partition a | b,c"}
    active.undo(handle)
    assert lab.shaped == lab.experiment.links
    assert run.fault_phases() == ["strike", "undo"]
    with pytest.raises(InputError, match="unknown device 'z'"):
        active.strike(kill="z")


def test_undo_reverts_kills_and_pauses(run: FakeRun, lab: RecordingLab) -> None:
    active = live()
    for action, device in (("pause", "b"), ("kill", "c")):
        handle = active.strike(**{action: device})
        assert active.state()["in_force"] == {handle: f"{action} {device}"}
        active.undo(handle)
        assert active.state()["devices"][device] == "up"
        with pytest.raises(InputError, match="no active fault"):
            active.undo(handle)


def test_restart_of_an_active_device_is_not_recorded(run: FakeRun) -> None:
    # The command changes nothing, so it is no fault.
    live().strike(restart="b")
    assert run.events == []


def test_manual_flap_records_each_turn_and_ends_with_links_up(
    run: FakeRun, lab: RecordingLab
) -> None:
    part = {"between": ["a", "b"], "down": "20ms", "up": "30ms"}
    turns = cast(Any, control.flap(control.connect(RUN), part, None))
    numbers = [next(turns)[0] for _ in range(3)]
    assert numbers == [1, 1, 2]
    assert not lab.shaped["a", "b"].up
    turns.close()
    assert lab.shaped == lab.experiment.links
    assert run.fault_phases() == ["strike", "undo", "strike", "undo"]


def test_failed_command_is_reported_and_the_run_continues(
    run: FakeRun, lab: RecordingLab
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
    ids=["no token", "wrong token", "list", "deep list", "no UTF-8", "empty"],
)
def test_unauthorised_or_malformed_request_is_refused(
    run: FakeRun, line: bytes
) -> None:
    with (
        control._open_connection(RUN) as connection,
        connection.makefile("rwb") as stream,
    ):
        stream.write(line + b"\n")
        stream.flush()
        # The server must not wait for more of a malformed request.
        connection.shutdown(socket.SHUT_WR)
        assert "error" in json.loads(stream.readline())
    assert "devices" in control.connect(RUN)({"show": None})


def test_lab_is_changed_directly_after_end_of_run(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_state()
    monkeypatch.setattr(Lab, "open", lambda _run: lab)
    ended_run = FakeRun(lab)
    with control.serve_requests(RUN, ended_run.respond):
        ask = control.connect(RUN)
        ask({"strike": {"kill": "b"}})
    with pytest.raises(TestbedError, match="run run-1 does not respond"):
        ask({"strike": {"restart": "b"}})
    assert control.strike(RUN, {"restart": "b"}) == "restart: b"
    assert lab.actions == ["kill b", "start b"]
    # The restart was no command of the run, whose events were final.
    assert [fields["action"] for _, fields in ended_run.events] == ["kill"]


def test_socket_of_a_killed_run_is_ignored(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_state()
    # A killed process leaves its socket in the file system, and nobody accepts connections.
    with control._short_path(RUN) as path, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    monkeypatch.setattr(Lab, "open", lambda _run: lab)
    assert control.strike(RUN, {"kill": "b"}) == "kill: b"
    with control.serve_requests(RUN, FakeRun(lab).respond):
        assert control.strike(RUN, {"restart": "b"}) == "restart: b"


def test_state_folder_may_have_a_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lab: RecordingLab
) -> None:
    # Linux limits the path of a Unix socket to 108 bytes.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 120)))
    write_run_state()
    with control.serve_requests(RUN, FakeRun(lab).respond):
        assert control.strike(RUN, {"kill": "c"}) == "kill: c"
