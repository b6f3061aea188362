"""Every fault on simulated devices: what is lost, what survives, and when."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.simulation.event_queue import EmptySchedule
from testbed.simulation.world import BOOT_SECONDS
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, first_message_bytes, idle, make_world


async def ticking(device: Device):
    """Compute a second at a time, for ever."""
    for number in range(10**6):
        await device.compute(lambda: None, Cost(1e6), Span("tick", batch=number))


def lead_for(seconds):
    async def lead(device: Device):
        await device.sleep(seconds)

    return lead


def test_kill_ends_the_program_in_mid_compute_and_restart_begins_anew():
    run = make_world(
        {"lead": lead_for(10.5), "b": ticking},
        faults=[{"kill": "b", "at": "2.5s", "for": "1s"}],
    )
    run.run()
    ticks = [
        (event["time"], event["batch"]) for event in events_of(run, "compute", "b")
    ]
    again = 3.5 + BOOT_SECONDS
    assert ticks == [
        (1, 0),
        (2, 1),
        (again + 1, 0),
        (again + 2, 1),
        (again + 3, 2),
        (again + 4, 3),
    ]
    assert [
        (e["time"], e["phase"], e["action"], e["target"])
        for e in events_of(run, "fault")
    ] == [
        (2.5, "strike", "kill", "b"),
        (3.5, "undo", "kill", "b"),
    ]
    assert [(e["time"], e["state"]) for e in events_of(run, "state", "b")] == [
        (0, "up"),
        (0, "started"),
        (again, "up"),
        (again, "started"),
        (10.5, "stopped"),
    ]


def test_kill_by_trigger_strikes_before_the_work_is_done():
    done = []

    async def works(device: Device):
        for number in range(5):
            await device.compute(
                lambda number=number: done.append(number),
                Cost(1e6),
                Span("forward", batch=number),
            )

    trigger = {"kill": "b", "when": {"device": "b", "begins": "forward", "batch": 2}}
    run = make_world({"lead": lead_for(10.5), "b": works}, faults=[trigger])
    run.run()
    assert done == [0, 1]
    assert events_of(run, "fault")[0]["time"] == 2


def test_killed_program_can_do_nothing_any_more():
    after = []

    async def stubborn(device: Device):
        child = asyncio.create_task(ticking(device))
        try:
            await device.sleep(100)
        finally:
            device.record("log", text="still here")
            after.append(child.cancelling())
            await device.send("lead", Message("ghost"))

    run = make_world(
        {"lead": lead_for(10.5), "b": stubborn}, faults=[{"kill": "b", "at": "1.5s"}]
    )
    run.run()
    assert after == [1]
    assert events_of(run, "log") == []
    assert events_of(run, "receive") == []
    assert len(events_of(run, "compute", "b")) == 1


def test_inbox_is_lost_and_unacknowledged_messages_are_sent_again():
    got = []

    async def lead(device: Device):
        await device.send("b", Message("before"))
        await device.sleep(2.0 - device.now())
        await device.send("b", Message("after"))

    async def slow(device: Device):
        await device.sleep(0.7)
        while True:
            got.append(((await device.receive()).kind, device.now()))

    run = make_world(
        {"lead": lead, "b": slow},
        faults=[{"kill": "b", "at": "0.5s"}, {"restart": "b", "at": "1s"}],
    )
    run.run()
    up = 1 + BOOT_SECONDS
    assert [kind for kind, _ in got] == []
    (after,) = [
        event for event in events_of(run, "receive") if event["message"] == "after"
    ]
    assert up <= after["time"] < up + 0.3
    assert run.event_queue.now == pytest.approx(after["time"] + 0.01)


def test_message_in_flight_to_a_killed_device_is_sent_again_from_the_start():
    async def lead(device: Device):
        await device.send("b", Message("large", padding=1_000_000))

    run = make_world(
        {"lead": lead, "b": idle}, faults=[{"kill": "b", "at": "0.9s", "for": "0"}]
    )
    run.run()
    (received,) = events_of(run, "receive")
    up = 0.9 + BOOT_SECONDS
    assert received["time"] == pytest.approx(
        up + first_message_bytes(run, "large") * 8 / 8e6 + 0.01
    )


def test_unsent_messages_of_a_killed_sender_are_lost():
    async def talks(device: Device):
        for i in range(3):
            asyncio.create_task(device.send("lead", Message(f"m{i}", padding=100_000)))  # noqa: RUF006
        await device.sleep(100)

    async def lead(device: Device):
        await asyncio.wait_for(idle(device), 5)

    run = make_world({"lead": lead, "b": talks}, faults=[{"kill": "b", "at": "0.11s"}])
    with pytest.raises(Exception, match="lead"):
        run.run()
    assert [event["message"] for event in events_of(run, "receive")] == ["m0"]


def test_pause_freezes_and_resumes():
    run = make_world(
        {"lead": lead_for(10.5), "b": ticking},
        faults=[{"pause": "b", "at": "2.5s", "for": "3s"}],
    )
    run.run()
    assert [event["time"] for event in events_of(run, "compute", "b")] == [
        1,
        2,
        6,
        7,
        8,
        9,
        10,
    ]


def test_paused_device_answers_when_it_wakes_and_sends_the_rest():
    async def lead(device: Device):
        await device.sleep(1)
        await device.send("b", Message("knock"))

    async def talks(device: Device):
        sending = asyncio.create_task(
            device.send("lead", Message("large", padding=1_000_000))
        )
        await device.receive()
        device.record("log", text="heard")
        await sending

    run = make_world(
        {"lead": lead, "b": talks}, faults=[{"pause": "b", "at": "0.5s", "for": "4s"}]
    )
    run.run()
    assert [event["time"] for event in events_of(run, "log")] == [4.5]
    assert run.event_queue.now == pytest.approx(4.51)
    run = make_world(
        {"lead": lead_for(9.5), "b": talks},
        faults=[{"pause": "b", "at": "0.5s", "for": "4s"}],
    )
    run.run()
    (received,) = events_of(run, "receive", "lead")
    assert received["time"] == pytest.approx(
        4 + first_message_bytes(run, "large") * 8 / 8e6 + 0.01
    )


def test_partition_lets_nothing_through_and_delivers_at_a_retransmission_after_it_heals():
    async def lead(device: Device):
        await device.sleep(1)
        await device.send("b", Message("m", padding=100))

    run = make_world(
        {"lead": lead, "b": idle},
        faults=[{"partition": [["lead"], ["b"]], "at": "0.5s", "for": "1s"}],
    )
    run.run()
    (received,) = events_of(run, "receive")
    # Sent at 1 s, tried again after 0.22 s and 0.44 s more, healed at 1.5 s.
    assert received["time"] == pytest.approx(
        1.66 + first_message_bytes(run, "m") * 8 / 8e6 + 0.01
    )
    links = events_of(run, "link")
    assert [(event["time"], event["source"], event["up"]) for event in links] == [
        (0.5, "lead", False),
        (0.5, "b", False),
        (1.5, "lead", True),
        (1.5, "b", True),
    ]


def test_partition_in_mid_message_keeps_sent_bytes():
    async def lead(device: Device):
        await device.send("b", Message("large", padding=1_000_000))

    run = make_world(
        {"lead": lead, "b": idle},
        faults=[{"partition": [["lead"]], "at": "0.5s", "for": "0.1s"}],
    )
    run.run()
    (received,) = events_of(run, "receive")
    whole = first_message_bytes(run, "large") * 8 / 8e6
    assert received["time"] == pytest.approx(0.72 + (whole - 0.5) + 0.01)


def test_long_partition_costs_the_connection_and_the_message_starts_over():
    async def lead(device: Device):
        await device.send("b", Message("large", padding=1_000_000))

    run = make_world(
        {"lead": lead, "b": idle},
        faults=[{"partition": [["lead"]], "at": "0.5s", "for": "5.2s"}],
    )
    run.run()
    (received,) = events_of(run, "receive")
    assert received["time"] == pytest.approx(
        6.5 + first_message_bytes(run, "large") * 8 / 8e6 + 0.01
    )


def test_acknowledgement_waits_for_the_way_back():
    async def lead(device: Device):
        await device.send("b", Message("m", padding=100))

    cut = {
        "degrade": {"from": "b", "to": "lead", "loss": "100%"},
        "at": "0",
        "for": "1s",
    }
    run = make_world({"lead": lead, "b": idle}, faults=[cut])
    run.run()
    arrived = events_of(run, "receive")[0]["time"]
    assert arrived < 0.02
    assert run.event_queue.now == pytest.approx(arrived + 0.22 + 0.44 + 0.88 + 0.02)


def test_peers_of_a_partition_are_unreachable():
    async def lead(device: Device):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(device.send("b", Message("m")), 0.3)
        await asyncio.wait_for(device.send("c", Message("m")), 0.3)

    run = make_world(
        {"lead": lead, "b": idle, "c": idle}, faults=[{"partition": [["b"]], "at": "0"}]
    )
    run.run()
    assert [event["peer"] for event in events_of(run, "send")] == ["c"]


def test_degrade_in_mid_message_slows_the_rest_of_it():
    async def lead(device: Device):
        await device.send("b", Message("large", padding=1_000_000))

    worse = {
        "degrade": {"between": ["lead", "b"], "rate": "4mbit", "delay": "100ms"},
        "at": "0.5s",
    }
    run = make_world({"lead": lead, "b": idle}, faults=[worse])
    run.run()
    whole = first_message_bytes(run, "large") * 8 / 8e6
    assert events_of(run, "receive")[0]["time"] == pytest.approx(
        0.5 + 2 * (whole - 0.5) + 0.1
    )
    assert run.event_queue.now == pytest.approx(0.5 + 2 * (whole - 0.5) + 0.2)


def test_heal_undoes_all_and_a_later_undo_is_no_error():
    async def lead(device: Device):
        await device.sleep(5)

    run = make_world(
        {"lead": lead, "b": idle},
        faults=[
            {"partition": [["b"]], "at": "1s", "for": "2s"},
            {"degrade": {"device": "b", "delay": "1s"}, "at": "1s"},
            {"heal": "all", "at": "2s"},
        ],
    )
    run.run()
    assert not run.shown.in_force
    assert {event["time"] for event in events_of(run, "link")} == {1, 2}


def test_restart_of_a_running_device_and_resume_of_an_awake_one_do_nothing():
    run = make_world(
        {"lead": lead_for(5.5), "b": ticking},
        faults=[{"restart": "b", "at": "1.5s"}, {"resume": "b", "at": "2.5s"}],
    )
    run.run()
    assert [event["time"] for event in events_of(run, "compute", "b")] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_killed_again_while_it_boots():
    run = make_world(
        {"lead": lead_for(9.5), "b": ticking},
        faults=[
            {"kill": "b", "at": "1.5s", "for": "1s"},
            {"kill": "b", "at": "3s", "for": "1s"},
        ],
    )
    run.run()
    assert [event["time"] for event in events_of(run, "compute", "b")] == [1, 7, 8, 9]


def test_lead_that_restarts_ends_the_run_when_it_returns():
    run = make_world(
        {"lead": lead_for(3), "b": idle},
        faults=[{"kill": "lead", "at": "1s", "for": "0"}],
    )
    run.run()
    assert run.event_queue.now == 1 + BOOT_SECONDS + 3


def test_deadlock_behind_a_dead_peer_is_found_and_named():
    async def lead(device: Device):
        await device.sleep(1)
        await device.send("b", Message("m"))

    run = make_world(
        {"lead": lead, "b": idle, "c": idle}, faults=[{"kill": "b", "at": "0.5s"}]
    )
    with pytest.raises(EmptySchedule):
        run.run()
    assert (
        run.describe_waits()
        == "at 1 s lead waits for b to acknowledge; b is off; c waits for a message"
    )
