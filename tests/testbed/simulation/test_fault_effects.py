"""Effects of every kind of fault on simulated devices: lost state, surviving state and times."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.simulation.event_queue import EmptySchedule
from testbed.simulation.world import BOOT_SECONDS
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, make_world, receive_forever
from tests.testbed.simulation.observations import (
    send_one,
    sleep_for,
    times_of,
    transmission_time,
    values_of,
)

MEGABYTE = 1_000_000
"""Padding of a message that takes a second on the link of 8 Mbit/s."""


async def compute_seconds(device: Device):
    """Compute for ever, a second at a time."""
    for number in range(10**6):
        await device.compute(lambda: None, Cost(1e6), Span("tick", batch=number))


def test_kill_interrupts_computation_and_restart_begins_program_anew():
    world = make_world(
        {"coordinator": sleep_for(10.5), "b": compute_seconds},
        faults=[{"kill": "b", "at": "2.5s", "for": "1s"}],
    )
    world.run()
    restart = 3.5 + BOOT_SECONDS
    # The third second was interrupted: the restarted program counts its batches from 0.
    assert values_of(world, "compute", "time", "batch", device="b") == [
        (1, 0),
        (2, 1),
        (restart + 1, 0),
        (restart + 2, 1),
        (restart + 3, 2),
        (restart + 4, 3),
    ]
    assert values_of(world, "fault", "time", "phase", "action", "target") == [
        (2.5, "strike", "kill", "b"),
        (3.5, "undo", "kill", "b"),
    ]
    assert values_of(world, "state", "time", "state", device="b") == [
        (0, "up"),
        (0, "started"),
        (restart, "up"),
        (restart, "started"),
        (10.5, "stopped"),
    ]


def test_kill_at_beginning_of_span_prevents_computation():
    completed = []

    async def compute_batches(device: Device):
        for number in range(5):
            await device.compute(
                lambda number=number: completed.append(number),
                Cost(1e6),
                Span("forward", batch=number),
            )

    kill = {"kill": "b", "when": {"device": "b", "begins": "forward", "batch": 2}}
    world = make_world(
        {"coordinator": sleep_for(10.5), "b": compute_batches}, faults=[kill]
    )
    world.run()
    assert completed == [0, 1]
    assert events_of(world, "fault")[0]["time"] == 2


def test_cleanup_of_killed_program_has_no_effects():
    cancellations = []

    async def resist_kill(device: Device):
        child = asyncio.create_task(compute_seconds(device))
        try:
            await device.sleep(100)
        finally:
            device.record("log", text="after the kill")
            cancellations.append(child.cancelling())
            await device.send("coordinator", Message("after-kill"))

    world = make_world(
        {"coordinator": sleep_for(10.5), "b": resist_kill},
        faults=[{"kill": "b", "at": "1.5s"}],
    )
    world.run()
    assert cancellations == [1]
    assert events_of(world, "log") == []
    assert events_of(world, "receive") == []
    assert len(events_of(world, "compute", "b")) == 1


def test_kill_discards_inbox_and_unacknowledged_message_is_sent_again():
    consumed = []

    async def send_before_and_after(device: Device):
        await device.send("b", Message("before"))
        await device.sleep(2.0 - device.now())
        await device.send("b", Message("after"))

    async def consume_late(device: Device):
        # The first message arrives before 0.5 s, and the kill discards the inbox before the program reads it.
        await device.sleep(0.7)
        while True:
            message = await device.receive()
            consumed.append(message.kind)

    world = make_world(
        {"coordinator": send_before_and_after, "b": consume_late},
        faults=[{"kill": "b", "at": "0.5s"}, {"restart": "b", "at": "1s"}],
    )
    world.run()
    restart = 1 + BOOT_SECONDS
    assert consumed == []
    (after,) = [
        event for event in events_of(world, "receive") if event["message"] == "after"
    ]
    assert restart <= after["time"] < restart + 0.3
    assert world.event_queue.now == pytest.approx(after["time"] + LINK.delay)


def test_message_in_flight_to_killed_device_is_sent_again_completely():
    world = make_world(
        {"coordinator": send_one("b", "large", MEGABYTE), "b": receive_forever},
        faults=[{"kill": "b", "at": "0.9s", "for": "0"}],
    )
    world.run()
    (received,) = events_of(world, "receive")
    restart = 0.9 + BOOT_SECONDS
    assert received["time"] == pytest.approx(
        restart + transmission_time(world, "large") + LINK.delay
    )


def test_unsent_messages_of_killed_sender_are_lost():
    async def send_three(device: Device):
        for number in range(3):
            message = Message(f"m{number}", padding=100_000)
            asyncio.create_task(device.send("coordinator", message))  # noqa: RUF006
        await device.sleep(100)

    async def receive_for_five_seconds(device: Device):
        await asyncio.wait_for(receive_forever(device), 5)

    # A message takes 0.1 s: the kill strikes while the second one is under way.
    world = make_world(
        {"coordinator": receive_for_five_seconds, "b": send_three},
        faults=[{"kill": "b", "at": "0.11s"}],
    )
    with pytest.raises(Exception, match="coordinator"):
        world.run()
    assert values_of(world, "receive", "message") == ["m0"]


def test_pause_delays_computation_by_duration_of_pause():
    world = make_world(
        {"coordinator": sleep_for(10.5), "b": compute_seconds},
        faults=[{"pause": "b", "at": "2.5s", "for": "3s"}],
    )
    world.run()
    # The third second of work is interrupted at 2.5 s and ends at 6 s instead of 3 s.
    assert times_of(world, "compute", "b") == [1, 2, 6, 7, 8, 9, 10]


async def send_large_and_receive(device: Device):
    """Send a message of a second to the coordinator and record the arrival of another one."""
    sending = asyncio.create_task(
        device.send("coordinator", Message("large", padding=MEGABYTE))
    )
    await device.receive()
    device.record("log", text="received")
    await sending


def test_paused_device_receives_and_acknowledges_after_resuming():
    world = make_world(
        {
            "coordinator": send_one("b", "request", start=1.0),
            "b": send_large_and_receive,
        },
        faults=[{"pause": "b", "at": "0.5s", "for": "4s"}],
    )
    world.run()
    assert times_of(world, "log") == [4.5]
    # The run ends when the acknowledgement has returned.
    assert world.event_queue.now == pytest.approx(4.5 + LINK.delay)


def test_paused_sender_continues_message_after_resuming():
    world = make_world(
        {"coordinator": sleep_for(9.5), "b": send_large_and_receive},
        faults=[{"pause": "b", "at": "0.5s", "for": "4s"}],
    )
    world.run()
    (received,) = events_of(world, "receive", "coordinator")
    # The pause of 4 s interrupts the message once.
    assert received["time"] == pytest.approx(
        4 + transmission_time(world, "large") + LINK.delay
    )


def test_message_blocked_by_partition_arrives_with_retransmission_after_healing():
    world = make_world(
        {"coordinator": send_one("b", padding=100, start=1.0), "b": receive_forever},
        faults=[{"partition": [["coordinator"], ["b"]], "at": "0.5s", "for": "1s"}],
    )
    world.run()
    (received,) = events_of(world, "receive")
    # Sent at 1 s, sent again after 0.22 s and after another 0.44 s; the partition heals at 1.5 s.
    assert received["time"] == pytest.approx(
        1 + 0.22 + 0.44 + transmission_time(world, "m") + LINK.delay
    )
    assert values_of(world, "link", "time", "source", "up") == [
        (0.5, "coordinator", False),
        (0.5, "b", False),
        (1.5, "coordinator", True),
        (1.5, "b", True),
    ]


def test_short_partition_preserves_bytes_already_sent():
    world = make_world(
        {"coordinator": send_one("b", "large", MEGABYTE), "b": receive_forever},
        faults=[{"partition": [["coordinator"]], "at": "0.5s", "for": "0.1s"}],
    )
    world.run()
    (received,) = events_of(world, "receive")
    # The first retransmission follows 0.22 s after the partition began.
    remaining = transmission_time(world, "large") - 0.5
    assert received["time"] == pytest.approx(0.5 + 0.22 + remaining + LINK.delay)


def test_message_starts_over_on_new_connection_after_long_partition():
    world = make_world(
        {"coordinator": send_one("b", "large", MEGABYTE), "b": receive_forever},
        faults=[{"partition": [["coordinator"]], "at": "0.5s", "for": "5.2s"}],
    )
    world.run()
    (received,) = events_of(world, "receive")
    # The sender reconnects every second after 2 s of silence: at 2.5, 3.5, 4.5, 5.5 and 6.5 s; healed at 5.7 s.
    assert received["time"] == pytest.approx(
        6.5 + transmission_time(world, "large") + LINK.delay
    )


def test_acknowledgement_waits_for_repair_of_return_link():
    cut = {
        "degrade": {"from": "b", "to": "coordinator", "loss": "100%"},
        "at": "0",
        "for": "1s",
    }
    world = make_world(
        {"coordinator": send_one("b", padding=100), "b": receive_forever}, faults=[cut]
    )
    world.run()
    arrival = events_of(world, "receive")[0]["time"]
    assert arrival < 0.02
    # Retransmissions double: after 0.22, 0.66 and 1.54 s; only the last one is answered.
    round_trip = 2 * LINK.delay
    assert world.event_queue.now == pytest.approx(
        arrival + 0.22 + 0.44 + 0.88 + round_trip
    )


def test_send_across_partition_times_out_and_other_peers_stay_reachable():
    async def send_to_both(device: Device):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(device.send("b", Message("m")), 0.3)
        await asyncio.wait_for(device.send("c", Message("m")), 0.3)

    world = make_world(
        {"coordinator": send_to_both, "b": receive_forever, "c": receive_forever},
        faults=[{"partition": [["b"]], "at": "0"}],
    )
    world.run()
    assert values_of(world, "send", "peer") == ["c"]


def test_degrade_slows_remainder_of_message_under_way():
    degrade = {
        "degrade": {"between": ["coordinator", "b"], "rate": "4mbit", "delay": "100ms"},
        "at": "0.5s",
    }
    world = make_world(
        {"coordinator": send_one("b", "large", MEGABYTE), "b": receive_forever},
        faults=[degrade],
    )
    world.run()
    # 4 Mbit/s is half of the link's rate; the acknowledgement takes the longer delay once more.
    remaining = 2 * (transmission_time(world, "large") - 0.5)
    assert events_of(world, "receive")[0]["time"] == pytest.approx(
        0.5 + remaining + 0.1
    )
    assert world.event_queue.now == pytest.approx(0.5 + remaining + 0.2)


def test_heal_reverts_all_faults_and_later_end_has_no_effect():
    world = make_world(
        {"coordinator": sleep_for(5), "b": receive_forever},
        faults=[
            {"partition": [["b"]], "at": "1s", "for": "2s"},
            {"degrade": {"device": "b", "delay": "1s"}, "at": "1s"},
            {"heal": "all", "at": "2s"},
        ],
    )
    world.run()
    assert not world.current.in_force
    assert set(times_of(world, "link")) == {1, 2}


def test_restart_of_running_and_resume_of_active_device_have_no_effect():
    world = make_world(
        {"coordinator": sleep_for(5.5), "b": compute_seconds},
        faults=[{"restart": "b", "at": "1.5s"}, {"resume": "b", "at": "2.5s"}],
    )
    world.run()
    assert times_of(world, "compute", "b") == [1, 2, 3, 4, 5]


def test_kill_during_boot_delays_restart():
    world = make_world(
        {"coordinator": sleep_for(9.5), "b": compute_seconds},
        faults=[
            {"kill": "b", "at": "1.5s", "for": "1s"},
            {"kill": "b", "at": "3s", "for": "1s"},
        ],
    )
    world.run()
    # Booting again from 4 s, the device computes from 6 s.
    assert times_of(world, "compute", "b") == [1, 7, 8, 9]


def test_run_ends_when_restarted_coordinator_returns():
    world = make_world(
        {"coordinator": sleep_for(3), "b": receive_forever},
        faults=[{"kill": "coordinator", "at": "1s", "for": "0"}],
    )
    world.run()
    assert world.event_queue.now == 1 + BOOT_SECONDS + 3


def test_deadlock_caused_by_dead_peer_is_detected_and_described():
    world = make_world(
        {
            "coordinator": send_one("b", start=1.0),
            "b": receive_forever,
            "c": receive_forever,
        },
        faults=[{"kill": "b", "at": "0.5s"}],
    )
    with pytest.raises(EmptySchedule):
        world.run()
    assert (
        world.describe_waits()
        == "at 1 s coordinator waits for b to acknowledge; b is off; c waits for a message"
    )
