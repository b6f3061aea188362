"""The shapers of several hosts as one, and what is measured and imposed of links between them."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.link import Link
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.hosts.shaper import (
    PathBlocked,
    Shapers,
    combine_halves,
    imposed_links,
    sample_links,
)
from testbed_controller.lab.runstate import RunState


def test_no_path_is_measured_without_links_between_hosts() -> None:
    links = {
        ("p", "q"): Link(rate=1e6, delay=0.01),
        ("q", "p"): Link(rate=1e6, delay=0.01),
    }
    state = RunState("run", "token", hosts={"a": ["p", "q"], "b": []})
    assert Shapers({}, state, {}, links).measure_path_delays() == []


HOST = {"p": "a", "q": "a", "r": "b"}
LINK = Link(rate=50e6, delay=0.005)


def half(
    sent: int,
    source: str,
    destination: str,
    delays: list[float],
    rate: float | None = None,
    gate: float = 0.0,
) -> dict:
    found = {
        "source": source,
        "destination": destination,
        "sent": sent,
        "delays": delays,
        "rate": rate,
    }
    return {**found, "asked": 50e6, "gate": gate}


def measured(there: list[float], back: list[float]):
    """Return what comes of packets p -> r and r -> p, whose delays are by the clocks of a and b."""
    halves = {
        "a": [half(30, "p", "r", []), half(0, "r", "p", back, 50e6)],
        "b": [half(0, "p", "r", there, 49.8e6), half(30, "r", "p", [])],
    }
    asked = {("p", "r"): LINK, ("r", "p"): LINK}
    return combine_halves(asked, halves, HOST, {"a": 0.0, "b": 10.003})


def test_a_difference_of_clocks_is_not_a_delay() -> None:
    found, moved = measured(
        [10.0052] * 30, [-9.9948] * 30
    )  # b's clock is 10 s ahead, not 10.003
    assert [each.delay for each in found] == pytest.approx([0.0052, 0.0052])
    assert [each.problem for each in found] == [None, None]
    assert moved["a", "b"] == (pytest.approx(10.0), pytest.approx(0.0004))


def test_excessive_delay_in_one_direction_is_detected() -> None:
    found, _ = measured([10.0072] * 30, [-9.9948] * 30)
    assert all(each.problem and "delays by 6.2" in each.problem for each in found)


def test_the_time_at_the_gate_of_the_sender_is_not_a_delay() -> None:
    halves = {
        "a": [half(30, "p", "r", [], gate=0.02)],
        "b": [half(0, "p", "r", [0.0252] * 30)],
    }
    [found], _ = combine_halves({("p", "r"): LINK}, halves, HOST, {"a": 0.0, "b": 0.0})
    assert found.delay == pytest.approx(0.0052)


def test_packets_that_did_not_arrive_are_loss() -> None:
    found, _ = measured([10.0052] * 20, [-9.9948] * 30)
    assert found[0].loss == pytest.approx(1 / 3)
    assert "loses 10 of 30" in (found[0].problem or "")


def test_one_way_packets_use_the_clocks_of_the_contexts() -> None:
    found, moved = measured([10.008] * 30, [])
    assert moved == {}
    assert found[0].delay == pytest.approx(0.005)
    assert "none of 30 packets arrived" in (found[1].problem or "")


@pytest.mark.parametrize(
    ("delay", "rate", "passes_small"),
    [(None, None, False), (0.006, None, True)],
    ids=["no packet", "no full frame"],
)
def test_blocked_path_is_named_with_the_passing_sizes(
    monkeypatch: pytest.MonkeyPatch,
    delay: float | None,
    rate: float | None,
    passes_small: bool,
) -> None:
    state = RunState("run", "token", hosts={"a": ["p", "q"], "b": ["r"]})
    shapers = Shapers({}, state, {}, {("p", "r"): LINK})
    measurement = LinkMeasurement("p", "r", LINK, rate=rate, delay=delay)
    monkeypatch.setattr(shapers, "_probe_between_hosts", lambda pairs: [measurement])
    with pytest.raises(PathBlocked) as caught:
        shapers.measure_path_delays()
    assert caught.value.ends == ("a", "b")
    assert caught.value.passes_small == passes_small


def test_path_delay_is_subtracted_from_the_link() -> None:
    links = {("p", "r"): LINK, ("p", "q"): LINK, ("r", "p"): Link(up=False)}
    found = imposed_links(links, HOST, {("a", "b"): 0.002, ("b", "a"): 0.002})
    assert found["p", "r"].delay == pytest.approx(0.003)
    assert found["p", "q"] == LINK
    assert not found["r", "p"].up


def test_path_slightly_slower_than_the_link_is_tolerated() -> None:
    assert (
        imposed_links({("p", "r"): Link()}, HOST, {("a", "b"): 0.0002})["p", "r"].delay
        == 0.0
    )


def test_path_slower_than_the_link_is_refused_with_both_delays() -> None:
    said = (
        r"p -> r needs a delay of 5 ms, but the path from a to b has 7.00 ms: .*--place"
    )
    with pytest.raises(InputError, match=said):
        imposed_links({("p", "r"): LINK}, HOST, {("a", "b"): 0.007})


def test_each_path_is_measured_over_its_steadiest_and_fastest_link() -> None:
    links = {
        ("p", "r"): Link(rate=1e6),
        ("q", "r"): Link(rate=1e9),
        ("r", "p"): Link(rate=1e9, delay=0.01, jitter=0.005),
        ("r", "q"): Link(rate=1e6),
        ("p", "q"): Link(),
    }
    assert sorted(sample_links(links, HOST)) == [("q", "r"), ("r", "q")]
