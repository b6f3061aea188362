"""TCP's window over lossy links, against rounds counted by hand, the square-root law and real connections."""

from collections.abc import Iterable
from random import Random

import pytest

from testbed.network.link import Link
from testbed.simulation.reno import RETRANSMISSION_TIMEOUT, Transmission, Window
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, idle, make_world
from tools.bench.losses import simulate_mean_time

TRIP = 0.1


def never() -> bool:
    return False


def fates(lost: Iterable[int]):
    """Lose the packets with these numbers, counted from 0 in the order in which they leave."""
    left, numbers = set(lost), iter(range(1_000_000))
    return lambda: next(numbers) in left


def course(
    packets: int, lost=never, unheard=never, window: Window | None = None
) -> Transmission:
    made = Transmission(window or Window(), packets, 0.0, TRIP, lost, unheard)
    made.run()
    return made


def test_window_doubles_until_a_message_fits_and_is_kept():
    window = Window()
    assert course(70, window=window).over == pytest.approx(2 * TRIP), (
        "10, 20 and 40 packets"
    )
    assert window.size == 80
    assert course(70, window=window).over == 0


def test_loss_that_later_packets_show_halves_the_window_and_costs_a_round_trip():
    window = Window()
    window.size = 40
    assert course(40, fates([5]), window=window).over == pytest.approx(TRIP)
    assert window.size == window.threshold == 20
    course(20, window=window)
    assert window.size == 21, (
        "above its threshold the window grows by one packet a round trip"
    )


def test_loss_that_few_later_packets_show_waits_a_quarter_of_a_round_trip():
    # Linux: a quarter of the smallest round trip (`tcp_rack_reo_wnd`), and some milliseconds of the kernel's timer.
    assert course(8, fates([5])).over == pytest.approx(1.25 * TRIP, abs=0.006)


def test_repeated_packets_do_not_keep_a_link_without_rate_busy():
    made = course(8, fates([5]))
    assert made.busy == 0, "all packets left at once"
    assert made.over > TRIP


def test_loss_at_the_end_of_a_round_shows_with_the_packets_of_the_next_round():
    window = Window()
    window.size = 40
    # Packet 39 ends the first round; 20 more leave in the second one, and show the loss.
    assert course(60, fates([39]), window=window).over == pytest.approx(2 * TRIP)
    assert window.size == 39, "half of 40 + 39"


def test_several_losses_of_one_round_halve_the_window_once():
    window = Window()
    window.size = 40
    assert course(40, fates([5, 9, 20]), window=window).sent == 43
    assert window.size == 20


def test_lone_packet_is_repeated_at_the_time_out_which_doubles():
    first = TRIP + RETRANSMISSION_TIMEOUT
    assert course(1, fates([0])).over == pytest.approx(first)
    assert course(1, fates([0, 1])).over == pytest.approx(2 * first)
    assert course(1, fates([0, 1, 2])).over == pytest.approx(4 * first)


def test_lost_end_of_a_message_waits_for_a_probe():
    assert course(8, fates([6, 7])).over == pytest.approx(4 * TRIP, abs=0.01), (
        "answer, two trips, the other packet"
    )


def test_new_packet_that_is_lost_as_a_probe_is_repeated():
    window = Window()
    window.size = 2
    assert course(3, fates([0, 1, 2]), window=window).sent == 6


def test_lost_repetition_without_anything_behind_it_waits_for_the_time_out():
    window = Window()
    made = course(4, fates([0, 4]), window=window)
    assert made.over > TRIP + RETRANSMISSION_TIMEOUT
    assert window.size <= 2


def test_time_out_that_repeats_halves_the_threshold_once():
    window = Window()
    window.size = 40
    assert course(1, fates([0, 1, 2]), window=window).sent == 4
    assert (window.size, window.threshold) == (2, 20)


def test_time_out_of_a_recovery_keeps_the_threshold():
    window = Window()
    window.size = 40
    course(40, fates([0, 40]), window=window)
    assert (window.size, window.threshold) == (2, 20)


def test_window_grows_after_a_time_out_while_packets_are_missing():
    window = Window()
    window.size = 20
    # The last packet reveals 19 lost ones; all ten that are repeated first are lost again, so the timer expires.
    made = course(20, fates([*range(19), *range(20, 30)]), window=window)
    # 1 packet at the time-out, then rounds of 2, 4, 8 and the remaining 4: RFC 5681, 3.1.
    silence = 1.25 * TRIP + TRIP + RETRANSMISSION_TIMEOUT
    assert made.over == pytest.approx(silence + 4 * TRIP, abs=0.006)
    assert (window.size, window.threshold) == (10, 10)


def test_packet_lost_again_after_a_time_out_halves_the_window():
    window = Window()
    window.size = 20
    # The fourth of the round of 8 is lost again, when the window has grown to its threshold of 10.
    lost = fates([*range(19), *range(20, 30), 40])
    assert course(20, lost, window=window).sent == 20 + 10 + 19 + 1
    assert (window.size, window.threshold) == (5, 5)


def test_two_packets_follow_a_time_out_of_a_lost_probe():
    window = Window()
    made = course(8, fates(range(9)), window=window)
    # Probe, time-out, then rounds of 2, 4 and 1.
    silence = 2 * TRIP + TRIP + RETRANSMISSION_TIMEOUT
    assert made.over == pytest.approx(silence + 3 * TRIP, abs=0.006)
    assert (window.size, window.threshold) == (5, 5)


def test_link_that_loses_nearly_everything_delays_nobody_for_ever():
    assert course(3, lambda: True).sent > 1000


def test_long_transfers_follow_the_square_root_law():
    for loss in (0.001, 0.01):
        draw = Random(1)
        made = course(200_000, lambda draw=draw, loss=loss: draw.random() < loss)
        in_flight = 200_000 * TRIP / made.over
        assert in_flight == pytest.approx((1.5 / loss) ** 0.5, rel=0.1)


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
def test_messages_take_as_long_as_on_real_connections(
    rate, delay, loss, size, measured
):
    # docs/fidelity.md has these means of the kernel's own Reno, with their errors.
    assert simulate_mean_time(Link(rate, delay, loss=loss), size, 40) == pytest.approx(
        measured, rel=0.15
    )


def test_losses_make_a_simulated_run_slower():
    async def lead(device):
        for _ in range(40):
            await device.send("b", Message("m", padding=1_000_000))

    run = make_world(
        {"lead": lead, "b": idle}, link=Link(rate=50e6, delay=0.05, loss=0.01)
    )
    run.run()
    took = events_of(run, "receive")[-1]["time"]
    window = 12.2 * 1448 * 8 / TRIP
    assert took == pytest.approx(40 * 1_000_000 * 8 / window, rel=0.15), (
        "12.2 packets a round trip at 1 %"
    )


def test_window_that_waits_leaves_a_shared_rate_to_others():
    async def lead(device):
        await device.send("c", Message("m", padding=1_000_000))

    async def other(device):
        for _ in range(3):
            await device.send("c", Message("n", padding=1_000_000))

    run = make_world(
        {"a": lead, "b": other, "c": idle},
        link=Link(rate=8e6),
        trace=["0,link a<->c delay,50ms", "0,link a<->c loss,1%"],
        access={"c": {"downlink": 8e6}},
    )
    run.run()
    quick = max(
        event["time"] for event in events_of(run, "receive") if event["message"] == "n"
    )
    assert quick < 4.5, (
        "the lossy message alone takes 6 s, and fills a sixth of the rate"
    )


def test_device_that_restarts_begins_with_a_small_window():
    async def lead(device):
        for _ in range(40):
            await device.send("b", Message("m", padding=70 * 1448))

    quiet = Link(rate=1e9, delay=0.05, loss=1e-9)
    run = make_world(
        {"lead": lead, "b": idle},
        link=quiet,
        faults=[{"kill": "b", "at": "2s", "for": "1s"}],
    )
    run.run()
    took = [
        event["time"] - event["start"] - event["queued"]
        for event in events_of(run, "send")
    ]
    slow = [seconds for seconds in took if seconds > 0.25]
    assert len(slow) == 2, "the first message, and the first after the restart"
