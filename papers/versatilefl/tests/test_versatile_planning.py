"""Credibility, rearrangement and stages of VersatileFL against the examples of its paper."""

from __future__ import annotations

import math
import random

import pytest

from testbed.ml.slots.arrangement import partition_neurons
from testbed_versatilefl.maintenance import DynamicUpdate, is_valid, merge_rates
from testbed_versatilefl.method import Versatile
from testbed_versatilefl.planner import VersatileOptions
from testbed_versatilefl.rearrangement import (
    add_device,
    list_moves,
    rearrange_group,
    remove_device,
    share_neurons,
)
from testbed_versatilefl.records import (
    ALPHA,
    FAILURE_SERIES,
    ReceptionRecords,
    is_silent,
    mean_credibility,
    update_credibility,
)
from tests.helpers.runs import make_scenario, problem_of

INITIAL = [
    [1.0, 0.9, 0.3, 0.5],
    [0.6, 1.0, 0.9, 1.0],
    [0.3, 0.8, 1.0, 0.8],
    [0.5, 1.0, 0.9, 1.0],
]
RUNTIME = [
    [1.0, 0.0, 0.5, 0.1],
    [0.0, 1.0, 0.0, 0.0],
    [0.6, 0.0, 1.0, 0.3],
    [0.0, 0.0, 0.2, 0.1],
]
# Table I (c) of the paper, except for device 4 with itself: its printed value
# does not follow from (b), so it is 1 here.
AFTER = [
    [1.0, 0.09, 0.48, 0.14],
    [0.06, 1.0, 0.09, 0.10],
    [0.57, 0.08, 1.0, 0.35],
    [0.05, 0.10, 0.27, 1.0],
]


def pairs_of(rows):
    """Return the values of a table by pairs of different devices, numbered from 1."""
    values = {}
    for sender, row in enumerate(rows, start=1):
        for receiver, value in enumerate(row, start=1):
            if sender != receiver:
                values[str(sender), str(receiver)] = value
    return values


def test_updated_credibility_matches_table_1():
    before, runtime = pairs_of(INITIAL), pairs_of(RUNTIME)
    credibility = {
        pair: update_credibility(runtime[pair], before[pair], alpha=0.9)
        for pair in before
    }
    assert credibility == pytest.approx(pairs_of(AFTER))
    assert mean_credibility(credibility, "2") == pytest.approx(0.087, abs=5e-4)
    assert [name for name in "1234" if is_silent(runtime, name)] == ["2"]
    assert mean_credibility({}, "1") == 0


def make_records(alpha, initial=()):
    """Return the records of device e and a function from the casts of one window to the rates of reception."""
    records = ReceptionRecords("e", dict(initial), alpha, steps=1, record_delay=1)
    arrangement = partition_neurons([5, 5], "abcde", "horizontal")
    records.close_window(0, arrangement)

    def window(number, *casts):
        for sender, received in casts:
            records.note_cast(sender, received=received)
        records.close_window(number, arrangement)
        newest = records.newest["e"]
        assert newest[0] == number - 1
        return newest[1]

    return records, window


def test_cast_missing_in_slot_counts_as_lost():
    records, window = make_records(alpha=1)
    rates = window(
        1,
        ("a", True),
        ("a", False),
        ("a", True),
        ("a", True),
        ("b", True),
        ("c", False),
        ("e", True),
    )
    assert rates == {"a": (0.75, 0.75), "b": (1, 1), "c": (0, 0), "d": (0, 0)}
    # Device a fails in the middle of the window: its casts were received at the start only.
    assert window(
        2, *(("a", step < 3 * FAILURE_SERIES) for step in range(4 * FAILURE_SERIES))
    )["a"] == (0, 0.75)
    assert records.is_cut_off
    assert window(3, ("b", True))["a"] == (0, 0)
    assert not records.is_cut_off


def test_silent_device_loses_credibility_each_window():
    _, window = make_records(ALPHA, {("a", "e"): 0.5})
    assert window(1, ("b", True), ("b", False)) == {
        "a": (0, 0.05),
        "b": (0.5, 0.45),
        "c": (0, 0),
        "d": (0, 0),
    }
    assert window(2)["a"] == (0, 0.005)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.75, 1, 0.6], True),
        ([0.75, 1, 0.5], False),
        ([0.75, 0.25, 0.6], False),
        ([], True),
    ],
)
def test_batch_is_valid_if_all_success_rates_exceed_threshold(rates, expected):
    assert is_valid(rates, 0.5) is expected


def test_equal_rate_suffices_with_criterion_at_least():
    assert is_valid([0.75, 0.5], 0.5, equal_suffices=True)
    assert not is_valid([0.75, 0.4], 0.5, equal_suffices=True)


def test_rate_equal_to_threshold_is_too_low_despite_rounding():
    assert (0.2 + 0.4) / 2 > 0.3
    assert not is_valid([(0.2 + 0.4) / 2], 0.3)


def test_batch_without_any_received_value_is_invalid_in_the_first_stage():
    update = DynamicUpdate(VersatileOptions())
    assert not is_valid([1, 0], update.thres_fw)
    assert is_valid([1, 0.1], update.thres_fw)


def test_merged_rates_are_means_over_received_rates():
    assert merge_rates([(1.0, 0.5), (0.5, 0.25)], 2) == (0.75, 0.375)
    assert merge_rates([], 2) == (0.0, 0.0)


def test_neurons_are_shared_in_proportion_to_credibility():
    assert share_neurons([0.15, 0.6], 10) == [2, 8]
    before = partition_neurons([10], ["a", "b"], "horizontal")
    credibility = {"a": 0.15, "b": 0.6}
    after = rearrange_group(before, 0, credibility, seed=1)
    # Both devices had 5 neurons of the layer.
    assert [len(after.neurons_of(name, 0)) for name in "ab"] == [2, 8]
    (move,) = list_moves(before, after)
    assert (move.giver, move.taker, len(move.neurons)) == ("a", "b", 3)
    assert set(move.neurons) < set(before.neurons_of("a", 0))
    # The seed determines which neurons move.
    assert after == rearrange_group(before, 0, credibility, seed=1)
    choices = set()
    for seed in range(20):
        rearranged = rearrange_group(before, 0, credibility, seed)
        choices.add(rearranged.neurons_of("a", 0))
    assert len(choices) > 5


@pytest.mark.parametrize(
    ("weights", "total", "shares"),
    [([1, 1, 1], 10, [4, 3, 3]), ([0, 0], 4, [2, 2]), ([5], 3, [3])],
)
def test_shares_sum_to_number_of_neurons(weights, total, shares):
    assert share_neurons(weights, total) == shares


def devices(count):
    return [f"d{number}" for number in range(count)]


def test_joining_device_takes_even_share_of_smallest_group():
    before = partition_neurons([12, 12, 12, 12], devices(4), "hybrid")
    without = remove_device(before, "d3", {"d2": 0.8}, seed=1)
    assert without.members(1) == ("d2",)
    assert without.neurons_of("d2", 3) == range(12)
    after = add_device(without, "new", seed=1)
    assert after.members(1) == ("d2", "new")
    assert [
        len(after.neurons_of(name, layer)) for name in ("d2", "new") for layer in (2, 3)
    ] == [6] * 4
    # The other group is unchanged.
    assert after.layers[:2] == before.layers[:2]
    third = add_device(after, "third", seed=1)
    assert [len(third.neurons_of(name, 0)) for name in ("d0", "d1", "third")] == [
        4,
        4,
        4,
    ]
    with pytest.raises(ValueError, match="is a member already"):
        add_device(third, "third", seed=1)
    with pytest.raises(ValueError, match="no group has a neuron for new"):
        add_device(partition_neurons([2, 9], devices(2), "horizontal"), "new", seed=1)


def test_neurons_of_failed_device_are_reset_and_of_retired_device_move():
    before = partition_neurons([8, 8], devices(2), "horizontal")
    after = remove_device(before, "d1", {"d0": 1.0}, seed=3)
    assert {
        (move.giver, move.taker)
        for move in list_moves(before, after, devices_without_weights={"d1"})
    } == {(None, "d0")}
    assert {(move.giver, move.taker) for move in list_moves(before, after)} == {
        ("d1", "d0")
    }
    empty = remove_device(after, "d0", {}, seed=3)
    assert empty.members(0) == ()
    refilled = add_device(empty, "d1", seed=3)
    assert refilled.neurons_of("d1", 1) == range(8)
    assert [move.giver for move in list_moves(empty, refilled)] == [None, None]


def test_new_device_keeps_neurons_when_another_device_fails():
    before = add_device(
        partition_neurons([12], devices(2), "horizontal"), "new", seed=1
    )
    after = remove_device(before, "d1", {"d0": 0.8, "d1": 0.1}, seed=1)
    assert [len(after.neurons_of(name, 0)) for name in ("d0", "new")] == [6, 6]


def apply_moves(held, moves, assignment):
    """Apply moves to the neurons of each device and drop neurons of removed devices."""
    for move in moves:
        if move.giver is not None:
            assert set(move.neurons) <= held[move.giver, move.layer]
            held[move.giver, move.layer] -= set(move.neurons)
        taken = held.setdefault((move.taker, move.layer), set())
        assert not taken & set(move.neurons)
        taken |= set(move.neurons)
    return {
        place: neurons
        for place, neurons in held.items()
        if place[0] in assignment.devices
    }


def assert_neurons_match(assignment, layer, size, held):
    """Assert a single holder for each neuron of a layer, unless the group is empty."""
    holders = assignment.layers[layer]
    neurons = []
    for name, assigned in holders.items():
        neurons.extend(assigned)
        assert held.get((name, layer), set()) == set(assignment.neurons_of(name, layer))
    assert sorted(neurons) == (list(range(size)) if holders else [])


@pytest.mark.parametrize("kind", ["vertical", "hybrid", "horizontal"])
def test_removed_device_can_always_rejoin(kind):
    for seed in range(100):
        draws = random.Random(seed)
        names = devices(draws.randint(4, 6))
        # The layers have just enough neurons for one on each device of a group.
        groups = {"vertical": 4, "hybrid": 2, "horizontal": 1}[kind]
        sizes = [math.ceil(len(names) / groups)] * 4
        now, away = partition_neurons(sizes, names, kind), []
        for _ in range(20):
            if away and draws.random() < 0.5:
                now = add_device(now, away.pop(), seed)
            elif now.devices:
                away.append(draws.choice(now.devices))
                now = remove_device(now, away[-1], {}, seed)
        assert {*now.devices, *away} == set(names)


@pytest.mark.parametrize("kind", ["vertical", "hybrid", "horizontal"])
def test_random_changes_neither_lose_nor_duplicate_neurons(kind):
    for seed in range(350):
        draws = random.Random(seed)
        sizes = [draws.randint(6, 20) for _ in range(draws.randint(1, 5))]
        names = devices(draws.randint(len(sizes), 6))
        now = partition_neurons(sizes, names, kind)
        held = {
            (name, layer): set(now.neurons_of(name, layer))
            for name in names
            for layer in range(len(sizes))
        }
        away: list[str] = []
        for _ in range(10):
            before, credibility = now, {name: draws.random() for name in now.devices}
            event, gone = draws.choice(["fail", "retire", "join", "rearrange"]), set()
            if event == "join" and away:
                now = add_device(now, away.pop(), seed)
            elif event == "rearrange":
                now = rearrange_group(
                    now, draws.randrange(len(now.groups)), credibility, seed
                )
            elif event in ("fail", "retire") and now.devices:
                away.append(draws.choice(now.devices))
                now = remove_device(now, away[-1], credibility, seed)
                gone = {away[-1]} if event == "fail" else set()
                held = {
                    place: neurons
                    for place, neurons in held.items()
                    if place[0] not in gone
                }
            held = apply_moves(held, list_moves(before, now, gone), now)
            for layer, size in enumerate(sizes):
                assert_neurons_match(now, layer, size, held)


def test_later_stages_are_stricter_unless_options_are_fixed():
    update = DynamicUpdate(VersatileOptions())
    thresholds, reuses = [], []
    for stage in range(12):
        update.stage = stage
        thresholds.append(update.thres_fw)
        reuses.append(update.grad_reuse_bw)
    assert thresholds[:7] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    assert reuses == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    fixed = DynamicUpdate(VersatileOptions(thres_fw="30%", grad_reuse_bw=4))
    fixed.stage = 5
    assert (fixed.thres_fw, fixed.grad_reuse_bw) == (0.3, 4)


def test_stage_begins_after_steps_without_improvement():
    update, stages = DynamicUpdate(VersatileOptions()), []
    for step in range(200):
        update.observe_loss(step, 1.0 if step < 30 else 0.5)
        stages.append(update.stage)
    # The loss improves at steps 0 and 30; a stage begins 60 steps after an improvement and every 60 steps thereafter.
    assert [step for step in range(1, 200) if stages[step] > stages[step - 1]] == [
        90,
        150,
    ]
    impatient = DynamicUpdate(VersatileOptions(patience=1))
    impatient.observe_loss(0, 2.0)
    assert impatient.stage == 0


def test_single_device_without_links_can_be_planned():
    plan = Versatile().plan(
        problem_of(make_scenario(workers=0, method={"name": "versatile"}))[0]
    )
    assert plan.details.credibility_threshold == 1.0
