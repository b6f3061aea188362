"""A short, seeded part of the attack by random scenarios, and the reducer of what it finds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.trace.events import Event
from testbed_controller.api import build
from tools.stress import attack as command
from tools.stress import files, messages
from tools.stress.attack import attack
from tools.stress.check import (
    check_end,
    check_repetition,
    check_steps,
    simulate_trial,
)
from tools.stress.containers import compare_with_virtual
from tools.stress.generate import OPTIONS, random_scenario
from tools.stress.listeners import listeners
from tools.stress.reduce import reduce_scenario


@pytest.mark.parametrize("seed", range(40))
def test_random_scenarios_violate_nothing(seed: int) -> None:
    _, _, found = attack(seed)
    assert [each for each in found if not each.startswith("refused")] == []


def test_a_seed_gives_one_scenario_and_seeds_give_all_methods() -> None:
    assert random_scenario(7) == random_scenario(7)
    assert {
        random_scenario(seed)["workload"]["method"]["name"] for seed in range(200)
    } == set(OPTIONS)


def test_what_is_reduced_still_violates_and_has_nothing_needless() -> None:
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


def pipeline() -> Prepared:
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


def test_what_containers_compute_otherwise_than_the_virtual_clock_is_seen() -> None:
    prepared = pipeline()
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


def test_a_step_that_is_not_recorded_is_seen() -> None:
    prepared = pipeline()
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
def test_files_that_are_wrong_are_refused_in_few_words_and_little_time(
    seed: int,
) -> None:
    assert [
        each
        for each in files.attack(*files.damaged_file(seed))
        if not each.startswith("time")
    ] == []


def test_an_attack_that_is_ended_goes_on_after_the_seeds_that_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended_after_three(
        _: object, seeds: Iterator[int], *__: object
    ) -> Iterator[tuple[int, str, list[str]]]:
        for seed in itertools.islice(seeds, 3):
            yield seed, "examples", []
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "run_attacks", ended_after_three)
    monkeypatch.setattr("sys.argv", ["stress", "--files"])
    for kept in ("3", "6"):
        with pytest.raises(KeyboardInterrupt):
            command.main()
        assert (tmp_path / "next-file").read_text() == kept


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_are_taken_or_refused(
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
