"""Comparison of traffic between both clocks, that of containers and the virtual one: messages and casts of each link.

The verdict of a run in containers judges its times. A lost message or cast hardly changes any time, so only counting
detects it.
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

TIME_DEPENDENT_KINDS = ("hello", "ping", "pong")
"""Kinds of messages whose number depends on time: a device repeats hello until it is configured, and pings follow a
silence."""

HEADER_SLACK = 64
"""Accepted difference of a message's size in bytes: the simulator assumes a typical number of digits of sequence
numbers, and safetensors start at a multiple of 64 bytes."""

MAX_UNMATCHED_AT_END = 3
"""Messages of one kind and link that may be sent and not received, or received and not sent, as a run ends: a message
counts as sent once it is acknowledged, and a device whose program has ended acknowledges messages and drops them."""

COMPARED_TRAFFIC = {
    "received messages": ("receive", "messages"),
    "sent casts": ("cast", "casts"),
    "received casts": ("receive", "casts"),
}
"""For each description of compared traffic: the name of the events, and whether they are of messages or casts."""


def outcome_in(folder: Path) -> Outcome:
    """Return the outcome of a finished run from its results folder."""
    return files.load(folder).outcome


def message_sizes(outcome: Outcome, event_name: str, transmission: str) -> Sizes:
    """Return the sizes in all events with one name; ``transmission`` is ``messages`` or ``casts``.

    The events are ``send``, ``cast`` or ``receive``. A sent cast counts once for each intended receiver.
    """
    sizes: dict[Flow, list[int]] = defaultdict(list)
    for event in outcome.events:
        fields = event.fields
        # Other events may lack the field `message`.
        if event.event != event_name:
            continue
        if fields["message"] in TIME_DEPENDENT_KINDS:
            continue
        kind, size, device = fields["message"], fields["bytes"], event.device
        if event_name == "receive":
            # Only events of received casts have the number of the cast.
            is_cast = fields.get("cast") is not None
            if is_cast == (transmission == "casts"):
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
    """Return the differences in counts between a run in containers and the same run on the virtual clock, by link.

    ``excluded`` contains devices and kinds of messages whose number depends on the time of an event, such as a kill.
    ``unfinished`` is the number of messages of each kind and link that may be in transit when the coordinator ends the
    run.
    """
    differences = lost_in_containers(emulated, excluded=excluded)
    for description, (event_name, transmission) in COMPARED_TRAFFIC.items():
        expected = message_sizes(simulated, event_name, transmission)
        measured = message_sizes(emulated, event_name, transmission)
        for flow in sorted(expected.keys() | measured.keys()):
            # A flow is excluded if its sender, its receiver or its kind is.
            if {*flow} & {*excluded}:
                continue
            difference = _compare_sizes(
                expected.get(flow, []), measured.get(flow, []), unfinished
            )
            if difference:
                differences.append(f"{description} {flow}: {difference}")
    return differences


def _compare_sizes(
    expected: list[int], measured: list[int], unfinished: int
) -> str | None:
    if abs(len(expected) - len(measured)) > unfinished:
        return f"{len(measured)} in containers, {len(expected)} simulated"
    # If messages were in transit at the end, one list is longer.
    for measured_size, expected_size in zip(measured, expected, strict=False):
        if abs(measured_size - expected_size) > HEADER_SLACK:
            return f"{measured_size} bytes in containers, {expected_size} simulated"
    return None


def lost_in_containers(
    emulated: Outcome, *, excluded: Collection[str] = ()
) -> list[str]:
    """Return unintended losses by link; the check is valid for asynchronous methods, too.

    Losses are messages that were acknowledged but not received, or received but not acknowledged, and datagrams that a
    socket dropped before the agent read them.
    """
    losses = []
    sent = message_sizes(emulated, "send", "messages")
    received = message_sizes(emulated, "receive", "messages")
    for flow in sorted(sent.keys() | received.keys()):
        if {*flow} & {*excluded}:
            continue
        arrived, acknowledged = len(received.get(flow, [])), len(sent.get(flow, []))
        if abs(acknowledged - arrived) > MAX_UNMATCHED_AT_END:
            losses.append(f"{flow}: {acknowledged} sent, {arrived} received")
    for device, counts in emulated.fidelity.get("queues", {}).items():
        if counts.get("unread"):
            losses.append(f"{device}: its socket dropped {counts['unread']} datagrams")
    return losses


def size_differences(emulated: Outcome, simulated: Outcome) -> list[str]:
    """Return the differences in size of the largest message of each kind, for runs with unequal counts."""
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
