"""The command `testbed fault`, on a lab that records calls instead of using containers."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from testbed.common.errors import InputError
from testbed_controller.cli import changes as command
from testbed_controller.lab.lab import Lab
from tests.helpers.recording_lab import RecordingLab


@pytest.fixture(autouse=True)
def _open_recording_lab(monkeypatch: pytest.MonkeyPatch, lab: RecordingLab) -> None:
    monkeypatch.setattr(Lab, "open", lambda run: lab)
    monkeypatch.setattr(command.runstate, "choose", lambda run: run or "run-1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.fault, arguments)


def test_partition_is_undone_by_its_name(lab: RecordingLab) -> None:
    # a is separated from b and c, in both directions: 2 · 2 links.
    match = re.fullmatch(
        r"(partition-\w+): 4 directed links changed; undo with: testbed fault undo \1\n",
        call("partition", "a", "b,c").output,
    )
    assert match is not None
    name = match[1]
    assert not lab.shaped["a", "b"].up
    assert call("undo", name).output == "4 directed links changed\n"
    assert lab.shaped == lab.experiment.links
    error = call("undo", name).exception
    assert f"no active fault '{name}'; active: none" in str(error)


def test_devices_are_killed_and_restarted(lab: RecordingLab) -> None:
    assert call("restart", "b").output == "restart: b is up, nothing to do\n"
    assert call("kill", "b").output == "kill: b\n"
    # A container that does not run cannot be paused.
    assert call("pause", "b").output == "pause: b is down, nothing to do\n"
    assert call("restart", "b").output == "restart: b\n"
    assert lab.actions == ["kill b", "start b"]


def test_retired_device_stops_and_can_join_again(lab: RecordingLab) -> None:
    assert call("retire", "b").output == "retire: b\n"
    # The program hands over its state before the container stops.
    assert lab.agents["b"].leaving
    assert call("retire", "b").output == "retire: b is down, nothing to do\n"
    assert call("join", "b").output == "join: b\n"
    assert lab.actions == ["kill b", "start b"]


def test_throttle_prints_remaining_speed(lab: RecordingLab) -> None:
    output = call("throttle", "b", "--slowdown", "4").output
    # A slowdown of 4 leaves 1 / 4 of the speed.
    assert "b computes at 0.25 times its own speed; undo with" in output
    assert call("unthrottle", "b").output == "b computes at 1 times its own speed\n"


def test_flap_ends_after_number_of_outages_or_duration(lab: RecordingLab) -> None:
    flap = ("flap", "a", "b", "--down", "5ms", "--up", "5ms")
    assert "the links went down 2 times" in call(*flap, "--times", "2").output
    # The second outage would begin after 5 + 5 ms.
    assert "the links went down 1 times" in call(*flap, "--for", "8ms").output
    both = call(*flap, "--times", "2", "--for", "1s").exception
    assert "give one of the two" in str(both)
    assert "for: " in str(call(*flap, "--for", "soon").exception)
    # Links are restored at the end.
    assert lab.shaped == lab.experiment.links


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kill", "z"), "unknown device 'z'; run-1 has a, b, c"),
        (("degrade", "a", "b", "--preset", "telegraph"), "unknown preset 'telegraph'"),
        (("degrade", "a", "b"), "has no effect"),
        (
            ("degrade", "a", "b", "--jitter", "50ms"),
            "a jitter of 50ms is above the delay of 5ms",
        ),
        (("obstruct", "a", "--path-loss-exponent", "6"), "requires `network.radio"),
        (("partition", "a,b,c"), "has no effect"),
        (("throttle", "b", "--speed", "1flops"), "use at least 1kflops"),
    ],
)
def test_impossible_faults_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    error = call(*arguments).exception
    assert isinstance(error, InputError)
    assert message in str(error)


def test_faults_of_host_apply_to_its_devices(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices_by_host = {"east": ["a"], "west": ["b", "c"], "idle": []}
    # The state of a run on several hosts, with the devices of the recording lab.
    monkeypatch.setattr(command, "runstate", _State(devices_by_host))
    assert call("kill-host", "west").output == "kill: b\nkill: c\n"
    assert lab.states() == {"a": "running", "b": "exited", "c": "exited"}
    assert call("restart-host", "west").output == "restart: b\nrestart: c\n"
    assert "4 directed links changed" in call("partition-hosts", "east").output
    assert not lab.shaped["a", "b"].up
    assert not lab.shaped["c", "a"].up
    # b and c are on the same host.
    assert lab.shaped["b", "c"].up
    for host in ("idle", "north"):
        error = call("kill-host", host).exception
        assert isinstance(error, InputError)
        message = f"no devices on the host '{host}'; hosts with devices: east, west"
        assert message in str(error)


def test_host_fault_of_run_on_one_engine_is_refused(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "runstate", _State({}))
    error = call("kill-host", "west").exception
    assert isinstance(error, InputError)
    assert "name devices instead, as in 'testbed fault kill worker1'" in str(error)


class _State:
    """The functions of `runstate` used by the command."""

    def __init__(self, hosts: dict[str, list[str]]) -> None:
        self._hosts = hosts

    def choose(self, run: str | None) -> str:
        return run or "run-1"

    def hosts_of(self, _run: str) -> dict[str, list[str]]:
        return self._hosts


def test_one_way_without_destination_is_refused(lab: RecordingLab) -> None:
    error = call("degrade", "a", "--one-way", "--loss", "1%").exception
    assert "--one-way needs a DESTINATION" in str(error)
    assert lab.shaped == lab.experiment.links
