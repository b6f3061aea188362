"""Random effects of links on messages, against times computed by hand and probabilities."""

from statistics import fmean, pstdev

import pytest

from testbed.device import Device
from testbed.network.link import GilbertElliott, Link
from testbed.simulation.crossing import PACKET, Crossing, make_crossing
from testbed.simulation.reno import TIMEOUT_MARGIN, Window
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world, receive_forever
from tests.testbed.simulation.observations import transmission_time


def send_sequentially(count: int, padding: int = 0):
    async def program(device: Device):
        for _ in range(count):
            await device.send("b", Message("m", padding=padding))

    return program


def latencies(link: Link, count: int, padding: int = 0) -> list[float]:
    """Return the seconds between departure and arrival of each message."""
    world = make_world(
        {"coordinator": send_sequentially(count, padding), "b": receive_forever},
        link=link,
    )
    world.run()
    seconds = []
    for sent, received in zip(
        events_of(world, "send"), events_of(world, "receive"), strict=True
    ):
        departure = sent["start"] + sent["queued"]
        seconds.append(received["time"] - departure)
    return seconds


def draw_lateness(
    crossing: Crossing, packets: int, spacing: float, round_trip: float
) -> float:
    """Return the lateness of a message over a new connection without lost acknowledgements."""
    _, _, lateness = crossing.draw_message(
        packets * PACKET, spacing, round_trip, Window(), lambda: False
    )
    return lateness


def test_link_without_random_effects_on_time_needs_no_crossing():
    link = Link(rate=1e6, delay=1, duplicate=0.5, message_loss=0.5, limit=5)
    assert make_crossing(link, "seed") is None
    # A link that loses everything is interrupted, not random.
    assert make_crossing(Link(loss=1.0), "seed") is None


def test_latency_of_single_packets_has_jitter_of_link():
    seconds = latencies(Link(delay=0.1, jitter=0.02), 3000)
    assert fmean(seconds) == pytest.approx(0.1, rel=0.02)
    assert pstdev(seconds) == pytest.approx(0.02, rel=0.05)


def test_message_arrives_with_latest_of_simultaneous_packets():
    # The maximum of 100 uniform delays is on average 99/101 of the way from the lowest to the highest value, and a
    # uniform distribution with a standard deviation of 0.01 s extends sqrt(3) times as far to either side.
    crossing = Crossing(Link(delay=0.1, jitter=0.01, distribution="uniform"), "seed")
    lateness = [draw_lateness(crossing, 100, 0.0, 0.2) for _ in range(300)]
    assert fmean(lateness) == pytest.approx(0.01 * 3**0.5 * (99 / 101), rel=0.01)


def test_last_packet_decides_arrival_of_widely_spaced_packets():
    # Packets that leave farther apart than the jitter arrive in order.
    crossing = Crossing(Link(delay=0.1, jitter=0.01, distribution="uniform"), "seed")
    lateness = [draw_lateness(crossing, 100, 1.0, 0.2) for _ in range(3000)]
    assert fmean(lateness) == pytest.approx(0, abs=0.001)


def test_reordered_packet_skips_delay():
    count = 2000
    seconds = latencies(Link(delay=0.1, reorder=0.25), count)
    immediate = [latency for latency in seconds if latency < 0.05]
    delayed = [latency for latency in seconds if latency > 0.05]
    assert max(immediate) < 1e-9
    assert delayed == pytest.approx([0.1] * (count - len(immediate)))
    assert len(immediate) / count == pytest.approx(0.25, abs=0.03)


def test_message_of_many_packets_waits_for_packets_with_delay():
    seconds = latencies(Link(delay=0.1, reorder=0.25), 200, padding=40_000)
    assert min(seconds) == pytest.approx(0.1)


def test_corrupted_packet_counts_as_lost():
    seconds = latencies(Link(delay=0.01, corrupt=0.2), 1000)
    repeated = [latency for latency in seconds if latency > 0.1]
    assert len(repeated) == pytest.approx(1000 * 0.2, abs=50)
    # The time-out begins with the packet and exceeds the round trip of 0.02 s by a constant.
    assert min(repeated) == pytest.approx(0.01 + 0.02 + TIMEOUT_MARGIN)


def test_loss_bursts_delay_messages_more_than_independent_loss():
    bursts = GilbertElliott(p=0.02, r=0.1)
    losses = Crossing(Link(bursts=bursts), "seed")
    assert fmean(losses.draw_loss() for _ in range(100_000)) == pytest.approx(
        bursts.loss, rel=0.1
    )

    def mean_lateness(link):
        crossing = Crossing(link, "seed")
        return fmean(draw_lateness(crossing, 1, 0.0, 0.02) for _ in range(5000))

    # Within a burst the retransmissions are lost as well, and the time-out doubles each time.
    with_bursts = mean_lateness(Link(delay=0.01, bursts=bursts))
    independent = mean_lateness(Link(delay=0.01, loss=bursts.loss))
    assert with_bursts > 3 * independent


def test_retransmitted_bytes_take_time_on_link():
    world = make_world(
        {"coordinator": send_sequentially(1, 400_000), "b": receive_forever},
        link=Link(rate=8e6, delay=0.01, loss=0.3),
    )
    world.run()
    (received,) = events_of(world, "receive")
    # Each byte is sent 1 / (1 - 0.3) times on average; a tenth of tolerance for chance.
    assert received["time"] > transmission_time(world, "m") / 0.7 * 0.9


def test_duplicated_packets_do_not_change_latency():
    plain = latencies(Link(rate=8e6, delay=0.1), 50)
    assert latencies(Link(rate=8e6, delay=0.1, duplicate=0.5), 50) == plain


def test_latencies_are_reproducible():
    link = Link(delay=0.1, jitter=0.05)
    assert latencies(link, 50) == latencies(link, 50)


def test_messages_arrive_while_jittery_link_changes():
    world = make_world(
        {"coordinator": send_sequentially(40), "b": receive_forever},
        link=Link(delay=0.1, jitter=0.05),
        trace=[
            "2,link coordinator<->b jitter,50ms",
            "2,link coordinator<->b rate,1gbit",
            "4,link coordinator<->b rate,2gbit",
        ],
    )
    world.run()
    assert len(events_of(world, "receive")) == 40


def test_timeout_of_lost_acknowledgement_doubles_including_round_trip(monkeypatch):
    crossing = Crossing(Link(loss=0.5), "0")
    losses = iter([True, True, False])
    monkeypatch.setattr(crossing, "draw_loss", lambda: next(losses))
    first = 0.1 + TIMEOUT_MARGIN
    assert crossing.draw_acknowledgement(0.1) == pytest.approx(first + 2 * first)
