"""A short, seeded part of each attack, and the selection of seeds and evidence by the command."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.methods import METHODS
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.trace.events import Event
from testbed_controller.api import build
from tools.stress import attack as command
from tools.stress import files, messages
from tools.stress.attack import Report, attack_simulation
from tools.stress.check import (
    check_end,
    check_repetition,
    check_steps,
    simulate_trial,
)
from tools.stress.containers import compare_with_virtual
from tools.stress.generate import OPTIONS, random_method, random_scenario
from tools.stress.listeners import listeners
from tools.stress.reduce import reduce_scenario


@pytest.mark.parametrize("seed", range(40))
def test_random_scenarios_violate_nothing(seed: int) -> None:
    violations = attack_simulation(seed).violations
    assert [each for each in violations if not each.startswith("refused")] == []


@pytest.mark.parametrize("method", OPTIONS)
def test_methods_accept_every_value_that_random_scenarios_choose(method: str) -> None:
    for name, values in OPTIONS[method].items():
        for value in values:
            if value is not None:
                METHODS[method].Options(**{name: value})


def test_seed_determines_the_scenario_and_seeds_cover_all_methods() -> None:
    assert random_scenario(7) == random_scenario(7)
    assert {random_method(seed) for seed in range(200)} == set(OPTIONS)


def test_reduced_scenario_has_the_violation_and_no_needless_part() -> None:
    tree = random_scenario(3)
    tree["faults"] = [
        {"kill": "source", "at": "1s", "for": "1s"},
        {"pause": "source", "at": "2s", "for": "1s"},
    ]
    smaller = reduce_scenario(
        tree, lambda each: any("pause" in fault for fault in each["faults"])
    )
    assert smaller["faults"] == [{"pause": "source", "at": "2s", "for": "1s"}]
    assert set(smaller["workload"]["method"]) == {"name"}
    assert smaller["network"] == {"link": {}}


def prepare_pipeline() -> Prepared:
    """Return four steps of a pipeline of two devices without faults."""
    tree = random_scenario(0) | {
        "faults": [],
        "devices": {"source": {}, "w0": {}},
        "network": {"link": {}},
    }
    tree["workload"] = {
        "model": {"name": "mlp"},
        "data": {"name": "digits", "train": 64, "test": 32},
        "steps": 4,
    }
    tree["workload"]["method"] = {"name": "pipeline"}
    (trial,) = trials(build(**tree))
    return prepare(trial)


def test_loss_that_differs_between_the_clocks_is_a_violation() -> None:
    prepared = prepare_pipeline()
    outcome = simulate_trial(prepared)
    assert list(compare_with_virtual(prepared, outcome, outcome)) == []
    events = [
        Event(each.time, each.device, "step", {**each.fields, "loss": 9.0})
        if each.event == "step"
        else each
        for each in outcome.events
    ]
    (violation,) = compare_with_virtual(
        prepared, replace(outcome, events=events), outcome
    )
    assert violation.startswith("clocks: step 0 has loss 9.0")


def test_missing_step_is_a_violation() -> None:
    prepared = prepare_pipeline()
    outcome = simulate_trial(prepared)
    assert [
        *check_end(prepared, outcome),
        *check_steps(prepared, outcome),
        *check_repetition(outcome, simulate_trial(prepared)),
    ] == []
    lacking = replace(
        outcome,
        events=[each for each in outcome.events if each.fields.get("step") != 2],
    )
    assert list(check_steps(prepared, lacking)) == [
        "steps: 3 of 4 are recorded: [0, 1, 3]"
    ]
    assert any(
        each.startswith("repetition")
        for each in check_repetition(lacking, simulate_trial(prepared))
    )


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_damaged_files_are_rejected_with_a_short_message(seed: int) -> None:
    assert [
        each
        for each in files.attack(*files.damaged_file(seed))
        if not each.startswith("time")
    ] == []


class Command:
    """The command with attacks that report violations by seed, and with a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.seeds: list[int] = []
        self.violations: dict[int, list[str]] = {}
        self.order: Sequence[int] | None = None
        """Seeds that finish, in this order, before the command is interrupted; None for all seeds."""
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(command, "FOLDER", folder)
        monkeypatch.setattr(command, "run_attacks", self._run_attacks)

    def _run_attacks(
        self, _: object, seeds: Iterator[int], *__: object
    ) -> Iterator[Report]:
        for seed in seeds if self.order is None else self.order:
            self.seeds.append(seed)
            yield Report(seed, "examples", self.violations.get(seed, []))
        if self.order is not None:
            raise KeyboardInterrupt

    def run(self, *arguments: str) -> int:
        """Run the command with some arguments; return the exit status."""
        self._monkeypatch.setattr("sys.argv", ["stress", *arguments])
        return command.main()

    def interrupt(self, *finished: int) -> str:
        """Run the attack on files until these seeds have finished; return the stored next seed."""
        self.order = finished
        with pytest.raises(KeyboardInterrupt):
            self.run("--files")
        return (self.folder / "next-files").read_text()


@pytest.fixture
def stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_interrupted_attack_continues_with_the_lowest_seed_not_tried(
    stress: Command,
) -> None:
    assert stress.interrupt(0, 1, 2) == "3"
    assert stress.interrupt(3, 4) == "5"
    assert stress.interrupt(8, 6, 7) == "5"
    assert stress.interrupt(5, 6) == "7"


def test_count_is_the_number_of_attacks_with_the_selected_method(
    stress: Command,
) -> None:
    assert stress.run("--count", "3", "--only", "gpipe") == 0
    assert [random_method(seed) for seed in stress.seeds] == ["gpipe"] * 3
    assert not (stress.folder / "next-simulation").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "gpip", "--count", "1"],
        ["--only", "gpipe", "--files"],
        ["--first", "3", "--fresh"],
    ],
)
def test_options_without_effect_are_refused(
    stress: Command, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit):
        stress.run(*arguments)
    assert stress.seeds == []


def test_evidence_is_written_once_for_each_kind_of_violation(
    stress: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress.violations = {1: ["steps: 1 of 2", "steps: twice", "refused: x", "hang: y"]}
    reduced: list[str] = []

    def reduce_kind(seed: int, kind: str) -> dict[str, int]:
        reduced.append(kind)
        return {"seed": seed}

    monkeypatch.setattr(command, "smallest_scenario", reduce_kind)
    assert stress.run("--count", "2") == 1
    assert reduced == ["hang", "steps"]
    written = {path.name for path in stress.folder.iterdir()}
    assert {"simulation-1-steps.yaml", "simulation-1-hang.yaml"} <= written


def test_report_only_writes_no_evidence(stress: Command) -> None:
    stress.violations = {1: ["steps: 1 of 2"]}
    assert stress.run("--first", "0", "--count", "2", "--report-only") == 1
    assert list(stress.folder.iterdir()) == []


def kill_process(seed: int) -> Report:
    """Attack that seed 2 does not survive."""
    if seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return Report(seed, "examples", [])


def test_killed_process_is_a_violation_with_its_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = list(command.run_attacks(kill_process, iter(range(5)), 2, math.inf))
    assert sorted(report.seed for report in reports) == list(range(5))
    violations = {each.seed: each.violations for each in reports if each.violations}
    assert violations == {
        2: ["killed: the process of the attack ended without a report"]
    }
    assert "a process was killed during seeds" in capsys.readouterr().out


def test_scenario_of_a_killed_process_is_not_reduced(
    stress: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress.violations = {1: ["killed: the process of the attack ended"]}

    def reduce_kind(seed: int, kind: str) -> dict[str, int]:
        pytest.fail("would kill this process")

    monkeypatch.setattr(command, "smallest_scenario", reduce_kind)
    assert stress.run("--count", "2") == 1
    written = (stress.folder / "simulation-1-killed.yaml").read_bytes()
    assert written == command.to_yaml(random_scenario(1))


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_are_accepted_or_rejected(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MESSAGES", 300)
    try:
        assert [
            each
            for each in messages.attack(seed, listeners)
            if not each.startswith("time")
        ] == []
    finally:
        logging.disable(logging.NOTSET)
