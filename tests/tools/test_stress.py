"""A few seeds of each attack, and the command's selection of seeds and evidence."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
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
from tools.stress.generate import OPTIONS, Tree, random_method, random_scenario
from tools.stress.listeners import listeners
from tools.stress.reduce import reduce_scenario


@pytest.mark.parametrize("seed", range(40))
def test_random_scenarios_have_no_violations(seed: int) -> None:
    # A random scenario may be invalid, and is then refused.
    for violation in attack_simulation(seed).violations:
        assert violation.startswith("refused")


@pytest.mark.parametrize("method", OPTIONS)
def test_methods_accept_the_options_of_random_scenarios(method: str) -> None:
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

    def has_violation(candidate: Tree) -> bool:
        return any("pause" in fault for fault in candidate["faults"])

    smaller = reduce_scenario(tree, has_violation)
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
    events = []
    for event in outcome.events:
        fields = dict(event.fields)
        if event.event == "step":
            fields["loss"] = 9.0
        events.append(Event(event.time, event.device, event.event, fields))
    changed = replace(outcome, events=events)
    (violation,) = compare_with_virtual(prepared, changed, outcome)
    assert violation.startswith("clocks: step 0 has loss 9.0")


def test_missing_step_is_a_violation() -> None:
    prepared = prepare_pipeline()
    outcome, repetition = simulate_trial(prepared), simulate_trial(prepared)
    assert list(check_end(prepared, outcome)) == []
    assert list(check_steps(prepared, outcome)) == []
    assert list(check_repetition(outcome, repetition)) == []
    events = [event for event in outcome.events if event.fields.get("step") != 2]
    incomplete = replace(outcome, events=events)
    assert list(check_steps(prepared, incomplete)) == [
        "steps: 3 of 4 are recorded: [0, 1, 3]"
    ]
    violations = check_repetition(incomplete, repetition)
    assert any(violation.startswith("repetition") for violation in violations)


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_damaged_files_are_rejected_with_a_short_message(seed: int) -> None:
    # The duration depends on the load of this host, so slow attacks do not count.
    for violation in files.attack(*files.damaged_file(seed)):
        assert violation.startswith("time")


class FakeCommand:
    """The command with a temporary folder, and with fake attacks, which report given violations."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.seeds: list[int] = []
        """Seeds of the attacks so far."""
        self.violations: dict[int, list[str]] = {}
        """Violations by seed."""
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
def stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommand:
    return FakeCommand(tmp_path, monkeypatch)


def test_interrupted_attack_continues_with_the_lowest_unfinished_seed(
    stress: FakeCommand,
) -> None:
    # Processes finish seeds in any order. Without seed 5, the next attack begins with 5 and repeats 6, 7 and 8.
    assert stress.interrupt(0, 1, 2) == "3"
    assert stress.interrupt(3, 4) == "5"
    assert stress.interrupt(8, 6, 7) == "5"
    assert stress.interrupt(5, 6) == "7"


def test_count_is_the_number_of_attacks_with_the_selected_method(
    stress: FakeCommand,
) -> None:
    assert stress.run("--count", "3", "--only", "gpipe") == 0
    # Seeds of other methods are skipped, and do not count.
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
    stress: FakeCommand, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit):
        stress.run(*arguments)
    assert stress.seeds == []


def test_evidence_is_written_once_for_each_kind_of_violation(
    stress: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress.violations = {1: ["steps: 1 of 2", "steps: twice", "refused: x", "hang: y"]}
    # A refusal is no violation.
    reduced: list[str] = []

    def reduce_kind(seed: int, kind: str) -> dict[str, int]:
        reduced.append(kind)
        return {"seed": seed}

    monkeypatch.setattr(command, "smallest_scenario", reduce_kind)
    assert stress.run("--count", "2") == 1
    assert reduced == ["hang", "steps"]
    written = {path.name for path in stress.folder.iterdir()}
    assert {"simulation-1-steps.yaml", "simulation-1-hang.yaml"} <= written


def test_report_only_writes_no_evidence(stress: FakeCommand) -> None:
    stress.violations = {1: ["steps: 1 of 2"]}
    assert stress.run("--first", "0", "--count", "2", "--report-only") == 1
    assert list(stress.folder.iterdir()) == []


def kill_process(seed: int) -> Report:
    """Attack with a seed, and kill the process for seed 2, as the kernel does if memory is short."""
    if seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return Report(seed, "examples", [])


def test_killed_process_is_a_violation_with_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = list(command.run_attacks(kill_process, iter(range(5)), 2, math.inf))
    reports.sort(key=attrgetter("seed"))
    assert list(map(attrgetter("seed"), reports)) == list(range(5))
    [killed] = [report for report in reports if report.violations]
    assert killed.seed == 2
    assert killed.violations == [
        "killed: the process of the attack ended without a report"
    ]
    assert "a process was killed during seeds" in capsys.readouterr().out


def test_scenario_of_a_killed_process_is_not_reduced(
    stress: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress.violations = {1: ["killed: the process of the attack ended"]}

    # A reduction repeats the attack, which would kill this process.
    def reduce_kind(seed: int, kind: str) -> dict[str, int]:
        pytest.fail("the scenario is attacked again")

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
        for violation in messages.attack(seed, listeners):
            assert violation.startswith("time")
    finally:
        # The attack switches the log off.
        logging.disable(logging.NOTSET)
