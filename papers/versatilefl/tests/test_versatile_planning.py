"""VersatileFL's pure parts beside the examples that its paper works out."""

from __future__ import annotations

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
    SERIES,
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
# Of the paper's Table I (c), but for device 4 with itself: it does not follow from (b), and is 1 as all others.
AFTER = [
    [1.0, 0.09, 0.48, 0.14],
    [0.06, 1.0, 0.09, 0.10],
    [0.57, 0.08, 1.0, 0.35],
    [0.05, 0.10, 0.27, 1.0],
]


def table(rows):
    return {
        (str(a), str(b)): value
        for a, row in enumerate(rows, 1)
        for b, value in enumerate(row, 1)
        if a != b
    }


def test_the_credibility_of_table_1_follows_from_the_two_before_it():
    before, runtime = table(INITIAL), table(RUNTIME)
    found = {
        pair: update_credibility(runtime[pair], before[pair], alpha=0.9)
        for pair in before
    }
    assert found == pytest.approx(table(AFTER))
    assert mean_credibility(found, "2") == pytest.approx(0.087, abs=5e-4)
    assert [name for name in "1234" if is_silent(runtime, name)] == ["2"]
    assert mean_credibility({}, "1") == 0


def records_of(alpha, initial=()):
    """Return a function that notes casts in one window of device e after the other, and what each window leaves."""
    records = ReceptionRecords("e", dict(initial), alpha, steps=1, record_delay=1)
    arrangement = partition_neurons([5, 5], "abcde", "horizontal")
    records.close_window(0, arrangement)

    def window(number, *casts):
        for sender, received in casts:
            records.note_cast(sender, received=received)
        records.close_window(number, arrangement)
        found = records.newest["e"]
        assert found[0] == number - 1
        return found[1]

    return records, window


def test_a_cast_missing_in_its_slot_counts_as_lost():
    records, window = records_of(alpha=1)
    found = window(
        1,
        ("a", True),
        ("a", False),
        ("a", True),
        ("a", True),
        ("b", True),
        ("c", False),
        ("e", True),
    )
    assert found == {"a": (0.75, 0.75), "b": (1, 1), "c": (0, 0), "d": (0, 0)}
    # One that dies in mid-window: it was heard, but no more at the end.
    assert window(2, *(("a", step < 3 * SERIES) for step in range(4 * SERIES)))[
        "a"
    ] == (0, 0.75)
    assert records.is_cut_off
    assert window(3, ("b", True))["a"] == (0, 0)
    assert not records.is_cut_off


def test_a_silent_device_loses_credibility_window_by_window():
    _, window = records_of(ALPHA, {("a", "e"): 0.5})
    assert window(1, ("b", True), ("b", False)) == {
        "a": (0, 0.05),
        "b": (0.5, 0.45),
        "c": (0, 0),
        "d": (0, 0),
    }
    assert window(2)["a"] == (0, 0.005)


@pytest.mark.parametrize(
    ("rates", "goes_on"),
    [([0.75, 1, 0.5], True), ([0.75, 0.25, 0.5], False), ([], True)],
)
def test_a_batch_goes_on_while_every_success_rate_is_at_least_the_threshold(
    rates, goes_on
):
    assert is_valid(rates, 0.5) is goes_on


def test_the_rates_of_a_layer_are_means_over_received_notes():
    assert merge_rates([(1.0, 0.5), (0.5, 0.25)], 2) == (0.75, 0.375)
    assert merge_rates([], 2) == (0.0, 0.0)


def test_ten_neurons_are_shared_in_proportion_to_credibility():
    assert share_neurons([0.15, 0.6], 10) == [2, 8]
    before = partition_neurons([10], ["a", "b"], "horizontal")
    after = rearrange_group(before, 0, {"a": 0.15, "b": 0.6}, seed=1)
    assert [
        len(after.neurons_of(name, 0)) - len(before.neurons_of(name, 0))
        for name in "ab"
    ] == [
        -3,
        3,
    ]
    (move,) = list_moves(before, after)
    assert (move.giver, move.taker, len(move.neurons)) == ("a", "b", 3)
    assert set(move.neurons) < set(before.neurons_of("a", 0))
    # Which of them is drawn from the seed.
    assert after == rearrange_group(before, 0, {"a": 0.15, "b": 0.6}, seed=1)
    assert (
        len(
            {
                rearrange_group(before, 0, {"a": 0.15, "b": 0.6}, seed).neurons_of(
                    "a", 0
                )
                for seed in range(20)
            }
        )
        > 5
    )


@pytest.mark.parametrize(
    ("weights", "total", "found"),
    [([1, 1, 1], 10, [4, 3, 3]), ([0, 0], 4, [2, 2]), ([5], 3, [3])],
)
def test_shares_add_up(weights, total, found):
    assert share_neurons(weights, total) == found


def devices(count):
    return [f"d{number}" for number in range(count)]


def test_a_device_that_joins_takes_an_even_share_in_the_group_with_the_fewest():
    before = partition_neurons([12, 12, 12, 12], devices(4), "hybrid")
    without = remove_device(before, "d3", {"d2": 0.8}, seed=1)
    assert without.members(1) == ("d2",)
    assert without.neurons_of("d2", 3) == range(12)
    after = add_device(without, "new", seed=1)
    assert after.members(1) == ("d2", "new")
    assert [
        len(after.neurons_of(name, layer)) for name in ("d2", "new") for layer in (2, 3)
    ] == [6] * 4
    # The other group is as it was.
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


def test_neurons_of_a_device_that_failed_start_anew_and_those_of_one_that_retires_travel():
    before = partition_neurons([8, 8], devices(2), "horizontal")
    after = remove_device(before, "d1", {"d0": 1.0}, seed=3)
    assert {
        (move.giver, move.taker) for move in list_moves(before, after, gone={"d1"})
    } == {(None, "d0")}
    assert {(move.giver, move.taker) for move in list_moves(before, after)} == {
        ("d1", "d0")
    }
    nobody = remove_device(after, "d0", {}, seed=3)
    assert nobody.members(0) == ()
    again = add_device(nobody, "d1", seed=3)
    assert again.neurons_of("d1", 1) == range(8)
    assert [move.giver for move in list_moves(nobody, again)] == [None, None]


def test_a_newcomer_keeps_its_neurons_when_another_device_fails():
    before = add_device(
        partition_neurons([12], devices(2), "horizontal"), "new", seed=1
    )
    after = remove_device(before, "d1", {"d0": 0.8, "d1": 0.1}, seed=1)
    assert [len(after.neurons_of(name, 0)) for name in ("d0", "new")] == [6, 6]


def carried_out(held, found, now):
    """Move neurons as devices do; what the last device of a group takes along is nobody's."""
    for move in found:
        if move.giver is not None:
            assert set(move.neurons) <= held[move.giver, move.layer]
            held[move.giver, move.layer] -= set(move.neurons)
        taken = held.setdefault((move.taker, move.layer), set())
        assert not taken & set(move.neurons)
        taken |= set(move.neurons)
    return {
        place: neurons for place, neurons in held.items() if place[0] in now.devices
    }


@pytest.mark.parametrize("kind", ["vertical", "hybrid", "horizontal"])
def test_a_removed_device_always_finds_a_place_again(kind):
    for seed in range(100):
        draws = random.Random(seed)
        names = devices(draws.randint(4, 6))
        sizes = [
            -(-len(names) // {"vertical": 4, "hybrid": 2, "horizontal": 1}[kind])
            for _ in range(4)
        ]
        now, away = partition_neurons(sizes, names, kind), []
        for _ in range(20):
            if away and draws.random() < 0.5:
                now = add_device(now, away.pop(), seed)
            elif now.devices:
                away.append(draws.choice(now.devices))
                now = remove_device(now, away[-1], {}, seed)
        assert {*now.devices, *away} == set(names)


@pytest.mark.parametrize("kind", ["vertical", "hybrid", "horizontal"])
def test_no_neuron_is_lost_or_doubled_by_failures_retirements_and_joins(kind):
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
            held = carried_out(held, list_moves(before, now, gone), now)
            for layer, size in enumerate(sizes):
                every = [
                    neuron
                    for neurons in now.layers[layer].values()
                    for neuron in neurons
                ]
                assert sorted(every) == (list(range(size)) if now.layers[layer] else [])
                assert all(
                    held.get((name, layer), set()) == set(now.neurons_of(name, layer))
                    for name in now.layers[layer]
                )


def test_the_stages_become_stricter_as_the_loss_stops_improving():
    update = DynamicUpdate(VersatileOptions())
    found = []
    for update.stage in range(12):
        found.append((update.thres_fw, update.grad_reuse_bw))
    assert [thres_fw for thres_fw, _ in found[:7]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    assert [reuse for _, reuse in found] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    given = DynamicUpdate(VersatileOptions(thres_fw="30%", grad_reuse_bw=4))
    given.stage = 5
    assert (given.thres_fw, given.grad_reuse_bw) == (0.3, 4)


def test_a_stage_begins_after_so_many_steps_without_a_better_loss():
    update, stages = DynamicUpdate(VersatileOptions()), []
    for step in range(200):
        update.observe_loss(step, 1.0 if step < 30 else 0.5)
        stages.append(update.stage)
    # Better at steps 0 and 30; 60 steps later, and then every 60, the next stage begins.
    assert [step for step in range(1, 200) if stages[step] > stages[step - 1]] == [
        90,
        150,
    ]
    impatient = DynamicUpdate(VersatileOptions(patience=1))
    impatient.observe_loss(0, 2.0)
    assert impatient.stage == 0


def test_a_single_device_without_links_can_be_planned():
    plan = Versatile().plan(
        problem_of(make_scenario(workers=0, method={"name": "versatile"}))[0]
    )
    assert plan.details.credibility_threshold == 1.0
