"""Links touched_pairs by fault actions, and the times of flaps."""

from __future__ import annotations

import math
from itertools import islice, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed.faults.link_actions import (
    Degrade,
    DegradePart,
    Flap,
    FlapPart,
    Heal,
    LinkSetPart,
    NetworkPartition,
)
from testbed.faults.parts import ACTIONS

# All directed links of four devices.
PAIRS = list(permutations("abcd", 2))


def touched_pairs(**keys) -> set[tuple[str, str]]:
    part = LinkSetPart.model_validate(keys)
    return {pair for pair in PAIRS if part.touches(pair)}


def test_link_set_covers_one_direction_both_or_all_links_of_device() -> None:
    assert touched_pairs(**{"from": "a", "to": "b"}) == {("a", "b")}
    assert touched_pairs(between=["a", "b"]) == {("a", "b"), ("b", "a")}
    assert touched_pairs(device="a") == {pair for pair in PAIRS if "a" in pair}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"from": "a"},
        {"to": "a"},
        {"device": "a", "between": ["a", "b"]},
        {"device": "a", "from": "b"},
        {"between": ["a", "b"], "to": "c"},
        {"device": "a", "from": "a", "to": "b"},
    ],
)
def test_link_set_requires_exactly_one_form_of_naming(keys) -> None:
    with pytest.raises(
        ValidationError,
        match="name the links with one of 'between', 'from' and 'to', or 'device'",
    ):
        LinkSetPart.model_validate(keys)


def test_link_set_reports_target_devices_and_missing_link() -> None:
    both = LinkSetPart.model_validate({"between": ["a", "b"]})
    assert both.target == "a <-> b"
    assert both.named() == [(("between", 0), "a"), (("between", 1), "b")]
    directed = LinkSetPart.model_validate({"from": "a", "to": "b"})
    assert directed.target == "a -> b"
    assert directed.named() == [(("from",), "a"), (("to",), "b")]
    assert directed.missing_link({("b", "a")}) == "there is no link from 'a' to 'b'"
    of_device = LinkSetPart.model_validate({"device": "c"})
    assert of_device.target == "c"
    # This form names no link that could be missing.
    assert of_device.missing_link(()) is None


@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=3))
def test_unnamed_devices_form_another_group(groups) -> None:
    nonempty = [tuple(sorted(group)) for group in groups if group]
    partition = NetworkPartition(tuple(nonempty))
    group_of = {}
    for number, group in enumerate(nonempty):
        group_of |= dict.fromkeys(group, number)
    for sender, receiver in PAIRS:
        # The group of an unnamed device is None.
        is_cut = group_of.get(sender) != group_of.get(receiver)
        assert partition.touches((sender, receiver)) == is_cut


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 20), st.integers(0, 400))
def test_flap_turns_are_timed_from_first_and_end_with_undo(
    down: int, up: int, times: int, duration: int
) -> None:
    flap = Flap(FlapPart(device="a", down=f"{down}s", up=f"{up}s", times=times))
    turns = list(flap.turns(10.0, 10.0 + duration))
    expected = []
    for turn in range(times):
        start = turn * (down + up)
        if start < duration:
            # The last turn is cut short at the end of the fault, so that links are up then.
            end = min(duration, start + down)
            expected += [("strike", 10.0 + start), ("undo", 10.0 + end)]
    assert turns == expected


def test_flap_without_duration_repeats_forever() -> None:
    flap = Flap(FlapPart(device="a", down="1s", up="2s"))
    assert flap.reason_against_for is None
    turns = flap.turns(0.0, math.inf)
    # Each cycle of three seconds has two turns: turn 2000 starts cycle 1000.
    times = [time for _, time in islice(turns, 2000, 2004)]
    assert times == [3000.0, 3001.0, 3003.0, 3004.0]


def test_heal_mends_link_faults_only() -> None:
    heal = Heal("all")
    for name in ("partition", "degrade", "obstruct", "flap"):
        assert heal.mends(ACTIONS[name], "a <-> b")
    # Devices have repairs of their own: restart and unthrottle.
    assert not heal.mends(ACTIONS["kill"], "a")
    assert not heal.mends(ACTIONS["throttle"], "a")


def test_degradation_of_device_touches_incoming_links() -> None:
    assert Degrade(DegradePart(device="a", loss="1%")).touches(("b", "a"))
