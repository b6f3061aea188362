"""The combined shapers of several hosts: measured and emulated delays of links between hosts."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.hosts.shaper import (
    HostPath,
    PathBlocked,
    Shapers,
    combine_halves,
    links_to_emulate,
    sample_links,
)
from testbed_controller.lab.runstate import RunState

HOST = {"p": "a", "q": "a", "r": "b"}
"""Host of each device."""
LINK = Link(rate=50e6, delay=0.005)
CLOCKS_OF_CONTEXTS = {"a": 0.0, "b": 10.003}
"""Offsets of the hosts' clocks, as estimated from the controller; host b is exactly 10 s ahead."""


def test_no_path_is_measured_without_links_between_hosts() -> None:
    link = Link(rate=1e6, delay=0.01)
    state = RunState("run", "token", hosts={"a": ["p", "q"], "b": []})
    shapers = Shapers({}, state, {}, {("p", "q"): link, ("q", "p"): link})
    assert shapers.measure_path_delays() == []


def half_report(
    pair: Pair,
    sent: int = 0,
    delays: list[float] | None = None,
    rate: float | None = None,
    gate: float = 0.0,
) -> dict[str, object]:
    """Return the measurement of a link by one of the two hosts."""
    source, destination = pair
    return {
        "source": source,
        "destination": destination,
        "sent": sent,
        "delays": delays or [],
        "rate": rate,
        "asked": 50e6,
        "gate": gate,
    }


def measure_both_directions(
    forward: list[float], backward: list[float]
) -> tuple[list[LinkMeasurement], dict[HostPath, tuple[float, float]]]:
    """Combine the reports of 30 packets p -> r and 30 packets r -> p.

    Delays are the receiver's clock minus the sender's clock.
    """
    there, back = ("p", "r"), ("r", "p")
    halves = {
        "a": [
            half_report(there, sent=30),
            half_report(back, delays=backward, rate=50e6),
        ],
        "b": [
            half_report(there, delays=forward, rate=49.8e6),
            half_report(back, sent=30),
        ],
    }
    links = {there: LINK, back: LINK}
    return combine_halves(links, halves, HOST, CLOCKS_OF_CONTEXTS)


def test_difference_of_clocks_is_subtracted_from_delays() -> None:
    # The true delay of both directions is 5.2 ms.
    measurements, differences = measure_both_directions([10.0052] * 30, [-9.9948] * 30)
    delays = [measurement.delay for measurement in measurements]
    assert delays == pytest.approx([0.0052, 0.0052])
    assert [measurement.problem for measurement in measurements] == [None, None]
    assert differences["a", "b"] == (pytest.approx(10.0), pytest.approx(0.0004))


def test_excessive_delay_in_one_direction_is_detected() -> None:
    # Clocks and directions cannot be told apart: 7.2 and 5.2 ms are 6.2 ms in each direction.
    measurements, _ = measure_both_directions([10.0072] * 30, [-9.9948] * 30)
    for measurement in measurements:
        assert "delays by 6.2" in (measurement.problem or "")


def test_time_at_the_sender_gate_is_subtracted_from_delays() -> None:
    pair = ("p", "r")
    halves = {
        "a": [half_report(pair, sent=30, gate=0.02)],
        "b": [half_report(pair, delays=[0.0252] * 30)],
    }
    [measurement], _ = combine_halves({pair: LINK}, halves, HOST, {"a": 0.0, "b": 0.0})
    assert measurement.delay == pytest.approx(0.0052)


def test_packets_that_did_not_arrive_are_loss() -> None:
    [forward, _], _ = measure_both_directions([10.0052] * 20, [-9.9948] * 30)
    assert forward.loss == pytest.approx(1 / 3)
    assert "loses 10 of 30" in (forward.problem or "")


def test_one_way_packets_use_the_clocks_of_the_contexts() -> None:
    [forward, backward], differences = measure_both_directions([10.008] * 30, [])
    assert differences == {}
    # 10.008 s minus the offset of 10.003 s.
    assert forward.delay == pytest.approx(0.005)
    assert "none of 30 packets arrived" in (backward.problem or "")


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
    path_delays = {("a", "b"): 0.002, ("b", "a"): 0.002}
    emulated = links_to_emulate(links, HOST, path_delays)
    assert emulated["p", "r"].delay == pytest.approx(0.005 - 0.002)
    # Devices p and q are on the same host.
    assert emulated["p", "q"] == LINK
    assert not emulated["r", "p"].up


def test_path_slightly_slower_than_the_link_is_tolerated() -> None:
    # The tolerance of small delays is 0.3 ms.
    emulated = links_to_emulate({("p", "r"): Link()}, HOST, {("a", "b"): 0.0002})
    assert emulated["p", "r"].delay == 0.0


def test_path_slower_than_the_link_is_refused_with_both_delays() -> None:
    error = (
        r"p -> r needs a delay of 5 ms, but the path from a to b has 7.00 ms: .*--place"
    )
    with pytest.raises(InputError, match=error):
        links_to_emulate({("p", "r"): LINK}, HOST, {("a", "b"): 0.007})


def test_path_is_measured_over_steadiest_and_fastest_link() -> None:
    links = {
        ("p", "r"): Link(rate=1e6),
        ("q", "r"): Link(rate=1e9),
        # Jitter outweighs the rate.
        ("r", "p"): Link(rate=1e9, delay=0.01, jitter=0.005),
        ("r", "q"): Link(rate=1e6),
        # Both ends are on the same host.
        ("p", "q"): Link(),
    }
    assert sorted(sample_links(links, HOST)) == [("q", "r"), ("r", "q")]
