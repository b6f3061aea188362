"""Membership: which devices reply, have restarted or are silent; and the roles of devices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import (
    MEMBERSHIP_KINDS,
    Configured,
    Membership,
    Presence,
    RoleHolder,
    Status,
)
from testbed.messaging.typed_messages import TypedMessage
from testbed.wire.message import Message
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.worlds import LINK

NAMES = ("coordinator", "one", "two")


def run_coordinator(coordinate, status=Status, faults=()):
    """Run a coordinator's function of mailbox and membership beside two devices with replies to probes."""

    async def run_membership(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            await coordinate(mailbox, Membership(mailbox, NAMES))

    async def answer_probes(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            Presence(mailbox, "coordinator", status).greet()
            while True:
                await mailbox.changed()

    programs = {
        "coordinator": run_membership,
        "one": answer_probes,
        "two": answer_probes,
    }
    return simulate_programs(programs, faults=faults)


def log_texts(world):
    return [event.fields["text"] for event in world.events if event.event == "log"]


def test_device_without_role_may_join_after_greeting():
    async def coordinate(mailbox, members):
        members.assigned = frozenset({"one"})
        await mailbox.device.sleep(0.5)
        # Both programs start at time 0.
        assert members.present == {"one": 0.0, "two": 0.0}
        assert members.joiners == {"two"}

    run_coordinator(coordinate)


def test_exclusion_of_device_is_logged():
    async def coordinate(mailbox, members):
        members.exclude(["two"])
        assert members.excluded == {"two"}

    assert log_texts(run_coordinator(coordinate)) == [
        "two is excluded: it replies, but the other devices make no progress with it"
    ]


def test_answer_contains_status_of_device():
    async def coordinate(mailbox, members):
        mailbox.open(7)
        assert await members.ping_all({"one": 1.0, "two": 1.0}) == set()
        answer = members.answers["two"]
        assert answer.configuration == 7
        assert answer.holds == 3
        assert answer.actions == 9
        assert answer.computing
        # Tuples arrive as lists.
        assert answer.held == [[1, 2, [0]]]

    status = Status(holds=3, actions=9, computing=True, held=((1, 2, (0,)),))
    run_coordinator(coordinate, lambda: status)


def test_silent_device_is_returned_at_deadline():
    async def coordinate(mailbox, members):
        await mailbox.device.sleep(0.5)
        assert await members.ping_all({"one": 1.0, "two": 1.0}) == {"one"}
        assert mailbox.device.now() == 1.5

    run_coordinator(coordinate, faults=[{"kill": "one", "at": "200ms"}])


def test_restarted_device_is_recognised_until_next_configuration():
    async def coordinate(mailbox, members):
        await mailbox.device.sleep(0.5)
        members.mark_configured()
        await mailbox.device.sleep(5)
        assert members.restarted == {"one"}
        # The incarnation is the time of the program's start.
        assert members.assigned_incarnations["one"] == 0.0
        assert members.present["one"] > 0.0
        members.mark_configured()
        assert members.restarted == set()
        mailbox.open(2)
        assert members.present == {}

    fault = {"kill": "one", "at": "1000ms", "for": "1000ms"}
    run_coordinator(coordinate, faults=[fault])


def test_cancelled_probe_does_not_delay_next_probe():
    async def coordinate(device):
        links = {("coordinator", "one"): LINK, ("one", "coordinator"): LINK}
        async with Mailbox(device, links, MEMBERSHIP_KINDS) as mailbox:
            members = Membership(mailbox, ("coordinator", "one"))
            members.ask(["one"])
            due = mailbox.outbox.acknowledgement_deadline("one")
            members.ask(["one"])
            assert due > device.now()
            assert mailbox.outbox.acknowledgement_deadline("one") == due

    async def stay_silent(device):
        await asyncio.get_running_loop().create_future()

    simulate_programs({"coordinator": coordinate, "one": stay_silent})


def test_each_reason_against_joining_is_logged_once():
    async def coordinate(mailbox, members):
        for reason in ("a recovery is under way", "its units are another's"):
            members.refusal = reason
            # Each reply to a probe asks to join again.
            for _ in range(2):
                await members.ping_all({"two": 1.0})

    texts = log_texts(run_coordinator(coordinate))
    assert [text for text in texts if text.startswith("two ")] == [
        "two cannot join: a recovery is under way",
        "two cannot join: its units are another's",
    ]


def test_gathering_waits_until_deadline_of_missing_device():
    async def coordinate(mailbox, members):
        await mailbox.device.sleep(0.5)
        mailbox.open(2)
        # Device one is down; neither device two, which replies, nor the coordinator itself is waited for.
        await members.gather({"one": 1.0, "two": 3.0, "coordinator": 9.0})
        assert members.answers.keys() == {"two"}
        assert mailbox.device.now() == 1.0

    run_coordinator(coordinate, faults=[{"kill": "one", "at": "200ms"}])


def test_new_configuration_clears_ready_devices():
    async def coordinate(mailbox, members):
        mailbox.open(2)
        mailbox.post("coordinator", Configured(1, 0.0))
        assert members.ready == set()
        mailbox.post("coordinator", Configured(2, 0.0))
        assert members.ready == {"coordinator"}
        mailbox.open(3)
        assert members.ready == set()

    run_coordinator(coordinate)


@dataclass(frozen=True)
class AssignRole(TypedMessage, kind="assign-role", opens=True):
    configuration: int
    role: str


class RecordingRole:
    """A role with records of preparation, service and end."""

    actions, computing = 7, False

    def __init__(self, name, records):
        self.name, self.records = name, records

    async def prepare(self):
        self.records.append(f"{self.name} prepares")

    async def serve(self):
        self.records.append(f"{self.name} serves")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.records.append(f"{self.name} ends")


def run_role_holder(*assignments):
    """Assign roles, as (configuration, role), to a device; return records of the roles, and ready configurations."""
    records, ready_configurations = [], []

    async def assign_roles(device):
        async with Mailbox(device, {}, (*MEMBERSHIP_KINDS, AssignRole)) as mailbox:
            mailbox.on(
                Configured,
                lambda report: ready_configurations.append(report.configuration),
            )
            for configuration, role in assignments:
                mailbox.open(configuration)
                await mailbox.post("one", AssignRole(configuration, role))
            await device.sleep(1)

    async def serve_roles(device):
        async with Mailbox(device, {}, (*MEMBERSHIP_KINDS, AssignRole)) as mailbox:
            holder = RoleHolder(mailbox, "coordinator")
            holder.follow(
                AssignRole, lambda message: RecordingRole(message.role, records)
            )
            await holder.serve()

    simulate_programs({"coordinator": assign_roles, "one": serve_roles})
    return records, ready_configurations


def test_role_is_prepared_reported_and_served():
    records, ready_configurations = run_role_holder((1, "stage"))
    # The end of the run ends the role.
    assert records[:2] == ["stage prepares", "stage serves"]
    assert ready_configurations == [1]


def test_role_ends_with_newer_configuration_only():
    records, ready_configurations = run_role_holder(
        (1, "first"), (1, "late"), (2, "second")
    )
    assert records[:5] == [
        "first prepares",
        "first serves",
        "first ends",
        "second prepares",
        "second serves",
    ]
    assert ready_configurations[-1] == 2


def test_role_is_busy_until_sent_message_is_overdue():
    busy_reports = []

    async def ask_three_times(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            members = Membership(mailbox, NAMES)
            for _ in range(3):
                await device.sleep(1)
                await members.ping_all({"one": 1.0})
                busy_reports.append(members.answers["one"].computing)

    async def send_large_message(device):
        links = {("one", "two"): LINK, ("two", "one"): LINK}
        async with Mailbox(device, links, MEMBERSHIP_KINDS) as mailbox:
            holder = RoleHolder(mailbox, "coordinator")
            holder.assume(0, lambda: RecordingRole("stage", []))
            # 1.2 s at the planned megabyte a second, and twice that until it is overdue.
            mailbox.outbox.post("two", Message("large", padding=1_200_000))
            await holder.serve()

    async def receive_twice(device):
        await device.receive()
        await device.receive()

    simulate_programs(
        {
            "coordinator": ask_three_times,
            "one": send_large_message,
            "two": receive_twice,
        },
        link=replace(LINK, rate=LINK.rate / 10),
    )
    assert busy_reports == [True, True, False]
