"""`testbed fault`, on a lab that only remembers."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from testbed.common.errors import InputError
from testbed_controller.cli import changes as command
from testbed_controller.lab.lab import Lab
from tests.helpers.recording_lab import RecordingLab


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch, lab: RecordingLab) -> None:
    monkeypatch.setattr(Lab, "open", lambda run: lab)
    monkeypatch.setattr(command.runstate, "choose", lambda run: run or "run-1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.fault, arguments)


def test_a_partition_is_undone_by_its_handle(lab: RecordingLab) -> None:
    said = call("partition", "a", "b,c").output
    found = re.fullmatch(
        r"(partition-\w+): 4 directed links changed; undo with: testbed fault undo \1\n",
        said,
    )
    assert found is not None
    assert not lab.shaped["a", "b"].up
    assert call("undo", found[1]).output == "4 directed links changed\n"
    assert lab.shaped == lab.experiment.links
    assert f"no active fault '{found[1]}'; active: none" in str(
        call("undo", found[1]).exception
    )


def test_devices_are_killed_and_restarted(lab: RecordingLab) -> None:
    assert call("restart", "b").output == "restart: b is up, nothing to do\n"
    assert call("kill", "b").output == "kill: b\n"
    assert call("pause", "b").output == "pause: b is down, nothing to do\n"
    assert call("restart", "b").output == "restart: b\n"
    assert lab.actions == ["kill b", "start b"]


def test_a_device_that_retires_is_off_once_its_program_has_returned_and_joins_again(
    lab: RecordingLab,
) -> None:
    assert call("retire", "b").output == "retire: b\n"
    assert lab.agents["b"].leaving
    assert call("retire", "b").output == "retire: b is down, nothing to do\n"
    assert call("join", "b").output == "join: b\n"
    assert lab.actions == ["kill b", "start b"]


def test_a_throttle_says_what_is_left(lab: RecordingLab) -> None:
    assert (
        "b computes at 0.25 times its own speed; undo with"
        in call("throttle", "b", "--slowdown", "4").output
    )
    assert call("unthrottle", "b").output == "b computes at 1 times its own speed\n"


def test_a_flap_ends_by_times_or_after_a_while(lab: RecordingLab) -> None:
    flap = ("flap", "a", "b", "--down", "5ms", "--up", "5ms")
    assert "the links went down 2 times" in call(*flap, "--times", "2").output
    assert "the links went down 1 times" in call(*flap, "--for", "8ms").output
    assert "give one of the two" in str(
        call(*flap, "--times", "2", "--for", "1s").exception
    )
    assert "for: " in str(call(*flap, "--for", "soon").exception)
    assert lab.shaped == lab.experiment.links


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], said: str) -> None:
    error = call(*arguments).exception
    assert isinstance(error, InputError)
    assert said in str(error)


def test_a_host_is_killed_restarted_and_cut_off_by_its_devices(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = {"east": ["a"], "west": ["b", "c"], "idle": []}
    # Asked as a run over several hosts, and found as the lab that only remembers.
    monkeypatch.setattr(command, "runstate", _State(placed))
    assert call("kill-host", "west").output == "kill: b\nkill: c\n"
    assert lab.states() == {"a": "running", "b": "exited", "c": "exited"}
    assert call("restart-host", "west").output == "restart: b\nrestart: c\n"
    assert "4 directed links changed" in call("partition-hosts", "east").output
    assert not lab.shaped["a", "b"].up
    assert not lab.shaped["c", "a"].up
    assert lab.shaped["b", "c"].up
    for host in ("idle", "north"):
        with pytest.raises(
            InputError,
            match=f"no devices on a host '{host}'; hosts with devices: east, west",
        ):
            CliRunner().invoke(
                command.fault, ["kill-host", host], catch_exceptions=False
            )


def test_host_of_a_run_on_one_engine_is_refused(
    lab: RecordingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "runstate", _State({}))
    error = call("kill-host", "west").exception
    assert isinstance(error, InputError)
    assert "name devices instead, as in 'testbed fault kill worker1'" in str(error)


class _State:
    def __init__(self, hosts: dict[str, list[str]]) -> None:
        self._hosts = hosts

    def choose(self, run: str | None) -> str:
        return run or "run-1"

    def hosts_of(self, _run: str) -> dict[str, list[str]]:
        return self._hosts


def test_one_way_without_a_destination_is_refused(lab: RecordingLab) -> None:
    outcome = call("degrade", "a", "--one-way", "--loss", "1%")
    assert "--one-way needs a DESTINATION" in str(outcome.exception)
    assert lab.shaped == lab.experiment.links
