"""What chance does to simulated messages, against times computed by hand and figures of probability."""

from statistics import fmean, pstdev

import pytest

from testbed.device import Device
from testbed.network.link import GilbertElliott, Link
from testbed.simulation.crossing import PACKET, Crossing, make_crossing
from testbed.simulation.reno import RETRANSMISSION_TIMEOUT, Window
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, first_message_bytes, idle, make_world


def sending(count: int, padding: int = 0):
    async def lead(device: Device):
        for _ in range(count):
            await device.send("b", Message("m", padding=padding))

    return lead


def latencies(link: Link, count: int, padding: int = 0) -> list[float]:
    """Return by how much each message arrived later than its first byte could leave."""
    run = make_world({"lead": sending(count, padding), "b": idle}, link=link)
    run.run()
    sent = [event["start"] + event["queued"] for event in events_of(run, "send")]
    return [
        event["time"] - start
        for event, start in zip(events_of(run, "receive"), sent, strict=True)
    ]


def cross(way: Crossing, packets: int, spacing: float, round_trip: float) -> float:
    """Return by how much a message over a new connection is late, no acknowledgement being lost."""
    return way.draw_message(
        packets * PACKET, spacing, round_trip, Window(), lambda: False
    )[2]


def test_link_without_chance_has_no_processes():
    assert (
        make_crossing(
            Link(rate=1e6, delay=1, duplicate=0.5, message_loss=0.5, limit=5), "seed"
        )
        is None
    )
    assert make_crossing(Link(loss=1.0), "seed") is None


def test_jitter_of_lone_packets_is_the_link_s():
    drawn = latencies(Link(delay=0.1, jitter=0.02), 3000)
    assert fmean(drawn) == pytest.approx(0.1, rel=0.02)
    assert pstdev(drawn) == pytest.approx(0.02, rel=0.05)


def test_message_waits_for_the_latest_of_its_packets():
    # Of 100 uniform delays at once the largest is on average 99/101 of the way from the least to the most.
    way = Crossing(Link(delay=0.1, jitter=0.01, distribution="uniform"), "seed")
    lags = [cross(way, 100, 0.0, 0.2) for _ in range(300)]
    assert fmean(lags) == pytest.approx(0.01 * 3**0.5 * (99 / 101), rel=0.01)
    # Packets that leave a whole jitter apart come in order: the last one alone decides.
    lags = [cross(way, 100, 1.0, 0.2) for _ in range(3000)]
    assert fmean(lags) == pytest.approx(0, abs=0.001)


def test_reordered_packet_skips_the_delay():
    drawn = latencies(Link(delay=0.1, reorder=0.25), 2000)
    skipped = [each for each in drawn if each < 0.05]
    assert max(skipped) < 1e-9
    assert [each for each in drawn if each > 0.05] == pytest.approx(
        [0.1] * (2000 - len(skipped))
    )
    assert len(skipped) / 2000 == pytest.approx(0.25, abs=0.03)
    assert min(
        latencies(Link(delay=0.1, reorder=0.25), 200, padding=40_000)
    ) == pytest.approx(0.1)


def test_corruption_is_loss():
    late = [
        each for each in latencies(Link(delay=0.01, corrupt=0.2), 1000) if each > 0.1
    ]
    assert len(late) == pytest.approx(200, abs=50)
    assert min(late) == pytest.approx(0.01 + 0.02 + RETRANSMISSION_TIMEOUT)


def test_bursts_affect_retransmissions():
    bursts = GilbertElliott(p=0.02, r=0.1)
    way = Crossing(Link(bursts=bursts), "seed")
    fates = [way.draw_loss() for _ in range(100_000)]
    assert fmean(fates) == pytest.approx(bursts.loss, rel=0.1)
    bursty = Crossing(Link(delay=0.01, bursts=bursts), "seed")
    plain = Crossing(Link(delay=0.01, loss=bursts.loss), "seed")
    repeats = [
        fmean(cross(way, 1, 0.0, 0.02) for _ in range(5000)) for way in (bursty, plain)
    ]
    assert repeats[0] > 3 * repeats[1]


def test_bytes_sent_again_take_their_time_on_the_link():
    run = make_world(
        {"lead": sending(1, 400_000), "b": idle},
        link=Link(rate=8e6, delay=0.01, loss=0.3),
    )
    run.run()
    (received,) = events_of(run, "receive")
    clean = first_message_bytes(run, "m") * 8 / 8e6
    assert received["time"] > clean / 0.7 * 0.9


def test_duplicates_change_nothing():
    assert latencies(Link(rate=8e6, delay=0.1, duplicate=0.5), 50) == latencies(
        Link(rate=8e6, delay=0.1), 50
    )


def test_chance_depends_on_the_seed_and_on_how_often_the_link_has_changed():
    link = Link(delay=0.1, jitter=0.05)
    assert latencies(link, 50) == latencies(link, 50)
    run = make_world(
        {"lead": sending(40), "b": idle},
        link=link,
        trace=[
            "2,link lead<->b jitter,50ms",
            "2,link lead<->b rate,1gbit",
            "4,link lead<->b rate,2gbit",
        ],
    )
    run.run()
    drawn = [event["time"] - event["start"] for event in events_of(run, "receive")]
    assert len(drawn) == 40


def test_time_out_of_a_lost_answer_doubles_with_its_round_trip(monkeypatch):
    way = Crossing(Link(loss=0.5), "0")
    fates = iter([True, True, False])
    monkeypatch.setattr(way, "draw_loss", lambda: next(fates))
    first = 0.1 + RETRANSMISSION_TIMEOUT
    assert way.draw_answer(0.1) == pytest.approx(first + 2 * first)
