"""TCP Reno over lossy links, against rounds counted by hand, the square-root law and real connections."""

from collections.abc import Iterable
from random import Random

import pytest

from testbed.network.link import Link
from testbed.simulation.reno import TIMEOUT_MARGIN, Transmission, Window
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world, receive_forever
from tests.testbed.simulation.observations import times_of
from tools.bench.losses import simulate_mean_time

TRIP = 0.1
"""Round trip in seconds."""
TIMER_TICKS = 0.006
"""Tolerance in seconds for short timers, which the kernel rounds up to its tick."""


def lose_nothing() -> bool:
    return False


def lose_packets(numbers: Iterable[int]):
    """Make a loss process for the packets of some numbers, counted from 0 in the order of departure."""
    lost, departures = set(numbers), iter(range(1_000_000))
    return lambda: next(departures) in lost


def window_of(size: int) -> Window:
    window = Window()
    window.size = size
    return window


def transmit(
    packets: int, lost=lose_nothing, window: Window | None = None
) -> Transmission:
    """Transmit a message over a link without a rate and without lost acknowledgements."""
    transmission = Transmission(
        window or Window(), packets, 0.0, TRIP, lost, lose_nothing
    )
    transmission.run()
    return transmission


def test_window_doubles_until_message_fits_and_persists():
    window = Window()
    # Rounds of 10, 20 and 40 packets: the last one needs no further round trip to be complete.
    assert transmit(70, window=window).last_departure == pytest.approx(2 * TRIP)
    assert window.size == 80
    assert transmit(70, window=window).last_departure == 0


def test_loss_revealed_by_later_packets_halves_window_and_costs_round_trip():
    window = window_of(40)
    transmission = transmit(40, lose_packets([5]), window=window)
    assert transmission.last_departure == pytest.approx(TRIP)
    assert window.size == window.threshold == 20
    # From its threshold the window grows by one packet a round trip.
    transmit(20, window=window)
    assert window.size == 21


def test_loss_revealed_by_few_later_packets_waits_quarter_of_round_trip():
    # Linux waits a quarter of the smallest round trip (`tcp_rack_reo_wnd`), and some milliseconds of its timer.
    transmission = transmit(8, lose_packets([5]))
    assert transmission.last_departure == pytest.approx(1.25 * TRIP, abs=TIMER_TICKS)


def test_retransmission_does_not_occupy_link_without_rate():
    transmission = transmit(8, lose_packets([5]))
    assert transmission.sending_seconds == 0, "all packets left at once"
    assert transmission.last_departure > TRIP


def test_loss_at_end_of_round_is_revealed_by_next_round():
    window = window_of(40)
    # Packet 39 ends the first round; the 20 packets of the second round reveal the loss.
    transmission = transmit(60, lose_packets([39]), window=window)
    assert transmission.last_departure == pytest.approx(2 * TRIP)
    # 40 packets and the 39 acknowledged ones, halved.
    assert window.size == 39


def test_several_losses_of_one_round_halve_window_once():
    window = window_of(40)
    transmission = transmit(40, lose_packets([5, 9, 20]), window=window)
    assert transmission.sent_packets == 40 + 3
    assert window.size == 20


@pytest.mark.parametrize(("losses", "factor"), [(1, 1), (2, 2), (3, 4)])
def test_single_packet_is_repeated_after_timeout_that_doubles(losses, factor):
    timeout = TRIP + TIMEOUT_MARGIN
    transmission = transmit(1, lose_packets(range(losses)))
    # The probe waits as long as the first time-out, and the second time-out twice as long: 1, 1 + 1 and 1 + 1 + 2.
    assert transmission.last_departure == pytest.approx(factor * timeout)


def test_lost_end_of_message_waits_for_probe():
    # A probe after two round trips, its acknowledgement, and the round trip of the other lost packet.
    transmission = transmit(8, lose_packets([6, 7]))
    assert transmission.last_departure == pytest.approx(4 * TRIP, abs=0.01)


def test_lost_probe_with_new_packet_is_repeated():
    transmission = transmit(3, lose_packets([0, 1, 2]), window=window_of(2))
    assert transmission.sent_packets == 6


def test_lost_last_retransmission_waits_for_timeout():
    window = Window()
    transmission = transmit(4, lose_packets([0, 4]), window=window)
    assert transmission.last_departure > TRIP + TIMEOUT_MARGIN
    assert window.size <= 2


def test_repeated_timeout_halves_threshold_once():
    window = window_of(40)
    assert transmit(1, lose_packets([0, 1, 2]), window=window).sent_packets == 4
    assert (window.size, window.threshold) == (2, 20)


def test_timeout_during_recovery_keeps_threshold():
    window = window_of(40)
    transmit(40, lose_packets([0, 40]), window=window)
    assert (window.size, window.threshold) == (2, 20)


def test_window_grows_after_timeout_while_packets_are_missing():
    window = window_of(20)
    # The last packet reveals 19 losses; the first ten retransmissions are lost as well, so the timer expires.
    lost = lose_packets([*range(19), *range(20, 30)])
    transmission = transmit(20, lost, window=window)
    # 1 packet at the time-out, then rounds of 2, 4, 8 and the remaining 4 (RFC 5681, 3.1).
    silence = 1.25 * TRIP + TRIP + TIMEOUT_MARGIN
    assert transmission.last_departure == pytest.approx(
        silence + 4 * TRIP, abs=TIMER_TICKS
    )
    assert (window.size, window.threshold) == (10, 10)


def test_packet_lost_again_after_timeout_halves_window():
    window = window_of(20)
    # The fourth packet of the round of 8 is lost again, when the window has grown to its threshold of 10.
    lost = lose_packets([*range(19), *range(20, 30), 40])
    assert transmit(20, lost, window=window).sent_packets == 20 + 10 + 19 + 1
    assert (window.size, window.threshold) == (5, 5)


def test_round_of_two_packets_follows_timeout_of_lost_probe():
    window = Window()
    transmission = transmit(8, lose_packets(range(9)), window=window)
    # Probe, time-out, then rounds of 2, 4 and 1.
    silence = 2 * TRIP + TRIP + TIMEOUT_MARGIN
    assert transmission.last_departure == pytest.approx(
        silence + 3 * TRIP, abs=TIMER_TICKS
    )
    assert (window.size, window.threshold) == (5, 5)


def test_transmission_ends_even_if_every_packet_is_lost():
    assert transmit(3, lambda: True).sent_packets > 1000


@pytest.mark.parametrize("loss", [0.001, 0.01])
def test_long_transfer_follows_square_root_law(loss):
    draw = Random(1)
    packets = 200_000
    transmission = transmit(packets, lambda: draw.random() < loss)
    # Mathis et al. 1997: sqrt(3/2) / sqrt(loss) packets per round trip.
    mean_window = packets * TRIP / transmission.last_departure
    assert mean_window == pytest.approx((1.5 / loss) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("rate", "delay", "loss", "size", "measured"),
    [
        (100e6, 0.01, 0.01, 200_000, 0.254),
        (100e6, 0.01, 0.01, 2_000_000, 2.33),
        (10e6, 0.01, 0.01, 2_000_000, 2.74),
        (10e6, 0.01, 0.05, 20_000, 0.103),
        (10e6, 0.05, 0.05, 200_000, 3.26),
        (100e6, 0.05, 0.01, 20_000, 0.186),
        (100e6, 0.05, 0.05, 2_000_000, 29.5),
    ],
)
def test_mean_time_of_messages_matches_real_connections(
    rate, delay, loss, size, measured
):
    # docs/fidelity.md has these means of the kernel's own Reno, with their errors.
    assert simulate_mean_time(Link(rate, delay, loss=loss), size, 40) == pytest.approx(
        measured, rel=0.15
    )


def test_loss_limits_throughput_of_simulated_run():
    count, size = 40, 1_000_000

    async def send_sequentially(device):
        for _ in range(count):
            await device.send("b", Message("m", padding=size))

    world = make_world(
        {"coordinator": send_sequentially, "b": receive_forever},
        link=Link(rate=50e6, delay=0.05, loss=0.01),
    )
    world.run()
    # 12.2 packets a round trip, by the square-root law at 1 %; 1,448 bytes of a packet are payload.
    rate = 12.2 * 1448 * 8 / TRIP
    last_arrival = times_of(world, "receive")[-1]
    assert last_arrival == pytest.approx(count * size * 8 / rate, rel=0.15)


def test_transmission_limited_by_window_leaves_shared_rate_to_others():
    async def send_over_lossy_link(device):
        await device.send("c", Message("lossy", padding=1_000_000))

    async def send_three(device):
        for _ in range(3):
            await device.send("c", Message("clean", padding=1_000_000))

    world = make_world(
        {"a": send_over_lossy_link, "b": send_three, "c": receive_forever},
        link=Link(rate=8e6),
        trace=["0,link a<->c delay,50ms", "0,link a<->c loss,1%"],
        access={"c": {"downlink": 8e6}},
    )
    world.run()
    clean_arrivals = [
        event["time"]
        for event in events_of(world, "receive")
        if event["message"] == "clean"
    ]
    # The lossy message alone takes 6 s and uses a sixth of the rate; with equal shares, the others would take 6 s.
    assert max(clean_arrivals) < 4.5


def test_window_is_initial_again_after_restart_of_receiver():
    async def send_sequentially(device):
        for _ in range(40):
            await device.send("b", Message("m", padding=70 * 1448))

    # A loss of almost zero selects the model of TCP's window without losing anything.
    world = make_world(
        {"coordinator": send_sequentially, "b": receive_forever},
        link=Link(rate=1e9, delay=0.05, loss=1e-9),
        faults=[{"kill": "b", "at": "2s", "for": "1s"}],
    )
    world.run()
    slow_messages = 0
    for event in events_of(world, "send"):
        departure = event["start"] + event["queued"]
        if event["time"] - departure > 0.25:
            slow_messages += 1
    assert slow_messages == 2, "the first message, and the first after the restart"
