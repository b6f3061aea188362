"""What links carried, counted alike on both clocks: messages and casts, sent and received, with their bytes.

Times of a run in containers are judged by its verdict. A lost message or cast shifts no time by much, so it is found by
counting alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from testbed.trace.outcome import Outcome
from testbed_controller.results import files

Flow = tuple[str, str, str]
"""Sender, receiver and kind of messages."""
Sizes = Mapping[Flow, list[int]]
"""Bytes of each message, in order."""

BY_TIME = ("hello", "ping", "pong")
"""Kinds of messages whose number depends on time: a device greets until it is configured, and is asked after a silence.
"""

HEADER_SLACK = 64
"""Bytes by which a message may differ: the simulator assumes the usual number of digits of sequence numbers, and
safetensors begin at a multiple of 64 bytes."""

AT_THE_END = 3
"""Messages of one kind and link that may be sent and not received, or received and not sent, as a run ends: a message
counts as sent once it is acknowledged, and a device whose program has ended acknowledges messages and drops them."""

WAYS = {
    "received": ("receive", "messages"),
    "cast": ("cast", "casts"),
    "heard": ("receive", "casts"),
}
"""What is compared: the event, and what it is about."""


def outcome_in(folder: Path) -> Outcome:
    """Return the outcome of a finished run from its results folder."""
    return files.load(folder).outcome


def message_sizes(outcome: Outcome, event_name: str, about: str) -> Sizes:
    """Return the sizes of the ``messages`` or ``casts`` of all events with one name.

    A cast counts once for each receiver that it is for.
    """
    sizes: dict[Flow, list[int]] = defaultdict(list)
    for event in outcome.events:
        fields = event.fields
        if event.event != event_name or fields["message"] in BY_TIME:
            continue
        kind, size, device = fields["message"], fields["bytes"], event.device
        if event_name == "receive":
            is_cast = fields.get("cast") is not None
            if is_cast == (about == "casts"):
                sizes[fields["peer"], device, kind].append(size)
            continue
        receivers = [fields["peer"]] if event_name == "send" else fields["peers"]
        for receiver in receivers:
            sizes[device, receiver, kind].append(size)
    return sizes


def count_differences(
    emulated: Outcome,
    simulated: Outcome,
    *,
    excluded: Collection[str] = (),
    unfinished: int = 0,
) -> list[str]:
    """Return how the counts of each link differ between a run in containers and the same run on the virtual clock.

    ``excluded`` names devices and kinds of messages whose number depends on an instant, such as that of a kill.
    ``unfinished`` is the number of messages of each kind and link that may be under way when the coordinator ends the
    run.
    """
    differences = lost_in_containers(emulated, excluded=excluded)
    for way, (event_name, about) in WAYS.items():
        expected = message_sizes(simulated, event_name, about)
        measured = message_sizes(emulated, event_name, about)
        for flow in sorted(expected.keys() | measured.keys()):
            if {*flow} & {*excluded}:
                continue
            difference = _compare_sizes(
                expected.get(flow, []), measured.get(flow, []), unfinished
            )
            if difference:
                differences.append(f"{way} {flow}: {difference}")
    return differences


def _compare_sizes(
    expected: list[int], measured: list[int], unfinished: int
) -> str | None:
    if abs(len(expected) - len(measured)) > unfinished:
        return f"{len(measured)} in containers, {len(expected)} simulated"
    for one, other in zip(measured, expected, strict=False):
        if abs(one - other) > HEADER_SLACK:
            return f"{one} bytes in containers, {other} simulated"
    return None


def lost_in_containers(
    emulated: Outcome, *, excluded: Collection[str] = ()
) -> list[str]:
    """Return losses that no method and no scenario asks for, by link; they hold for asynchronous methods as well.

    These are messages that were acknowledged and never received, or received and never acknowledged, and datagrams
    that a socket dropped before the agent could read them.
    """
    losses = []
    sent = message_sizes(emulated, "send", "messages")
    received = message_sizes(emulated, "receive", "messages")
    for flow in sorted(sent.keys() | received.keys()):
        if {*flow} & {*excluded}:
            continue
        arrived, acknowledged = len(received.get(flow, [])), len(sent.get(flow, []))
        if abs(acknowledged - arrived) > AT_THE_END:
            losses.append(f"{flow}: {acknowledged} sent, {arrived} received")
    for device, counts in emulated.fidelity.get("queues", {}).items():
        if counts.get("unread"):
            losses.append(f"{device}: its socket dropped {counts['unread']} datagrams")
    return losses


def size_differences(emulated: Outcome, simulated: Outcome) -> list[str]:
    """Return how the largest message of each kind differs between both clocks, where counts need not be equal."""
    expected, measured = _largest_by_kind(simulated), _largest_by_kind(emulated)
    differences = []
    for kind in sorted(expected.keys() | measured.keys()):
        difference = _compare_sizes(
            expected.get(kind, []), measured.get(kind, []), unfinished=0
        )
        if difference:
            differences.append(f"{kind}: {difference}")
    return differences


def _largest_by_kind(outcome: Outcome) -> dict[str, list[int]]:
    largest: dict[str, list[int]] = {}
    for (_, _, kind), sizes in message_sizes(outcome, "receive", "messages").items():
        largest[kind] = [max([*sizes, *largest.get(kind, [])])]
    return largest
