"""Which links an action strikes, and when those that flap are down."""

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

PAIRS = list(permutations("abcd", 2))


def touched(**keys) -> set[tuple[str, str]]:
    part = LinkSetPart.model_validate(keys)
    return {pair for pair in PAIRS if part.touches(pair)}


def test_links_are_one_or_both_directions_or_all_of_a_device() -> None:
    assert touched(**{"from": "a", "to": "b"}) == {("a", "b")}
    assert touched(between=["a", "b"]) == {("a", "b"), ("b", "a")}
    assert touched(device="a") == {pair for pair in PAIRS if "a" in pair}


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
def test_links_have_exactly_one_form_of_naming(keys) -> None:
    with pytest.raises(
        ValidationError,
        match="name the links with one of 'between', 'from' and 'to', or 'device'",
    ):
        LinkSetPart.model_validate(keys)


def test_targets_and_devices_are_named_as_in_the_scenario() -> None:
    both, one, all_of = (
        LinkSetPart.model_validate(keys)
        for keys in ({"between": ["a", "b"]}, {"from": "a", "to": "b"}, {"device": "c"})
    )
    assert [each.target for each in (both, one, all_of)] == ["a <-> b", "a -> b", "c"]
    assert both.named() == [(("between", 0), "a"), (("between", 1), "b")]
    assert one.named() == [(("from",), "a"), (("to",), "b")]
    assert one.missing_link({("b", "a")}) == "there is no link from 'a' to 'b'"
    assert all_of.missing_link(()) is None


@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=3))
def test_unnamed_devices_form_one_more_group(
    groups,
) -> None:
    found = NetworkPartition(tuple(tuple(sorted(group)) for group in groups if group))
    group_of = {
        name: number
        for number, group in enumerate(group for group in groups if group)
        for name in group
    }
    for pair in PAIRS:
        assert found.touches(pair) == (group_of.get(pair[0]) != group_of.get(pair[1]))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 20), st.integers(0, 400))
def test_turns_are_counted_from_the_first_and_the_links_are_up_at_the_end(
    down: int, up: int, times: int, lasts: int
) -> None:
    flap = Flap(FlapPart(device="a", down=f"{down}s", up=f"{up}s", times=times))
    found = list(flap.turns(10.0, 10.0 + lasts))
    expected = []
    for turn in range(times):
        begins = turn * (down + up)
        if begins < lasts:
            expected += [
                ("strike", 10.0 + begins),
                ("undo", 10.0 + min(lasts, begins + down)),
            ]
    assert found == expected


def test_flap_without_end_repeats_forever() -> None:
    flap = Flap(FlapPart(device="a", down="1s", up="2s"))
    assert flap.takes_no_for is None
    assert [moment for _, moment in islice(flap.turns(0.0, math.inf), 2000, 2004)] == [
        3000.0,
        3001.0,
        3003.0,
        3004.0,
    ]


def test_heal_repairs_links_only() -> None:
    heal = Heal("all")
    for name in ("partition", "degrade", "obstruct", "flap"):
        assert heal.mends(ACTIONS[name], "a <-> b")
    assert not heal.mends(ACTIONS["kill"], "a")
    assert not heal.mends(ACTIONS["throttle"], "a")
    assert Degrade(DegradePart(device="a", loss="1%")).touches(("b", "a"))
