"""The sending side as ``tc`` commands: an HTB tree that is built once and then changed leaf by leaf. Pure functions.

A leaf is the class of one destination with its queue; a filter leads packets to it by their destination address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from socket import inet_aton
from typing import Any

from testbed_controller.shaping.plan import InterfacePlan, SenderClass
from testbed_controller.shaping.tc import Tree

_TREE_NUMBER = 1
"""Number of the tree in class IDs, such as ``1:11``."""


def build(plan: InterfacePlan) -> list[str]:
    """Return the ``tc -batch`` lines for building the tree on an interface.

    Packets without a class (ARP, other destinations) pass the default class without impairments.
    """
    interface = plan.interface
    # After an incomplete attempt, HTB is the root already, and HTB cannot replace HTB. A pfifo can replace both.
    lines = [f"qdisc replace dev {interface} root handle 2: pfifo"]
    lines += _tree_of(plan).root(plan.uplink)
    for sender in plan.senders:
        lines += _add_class(interface, sender)
    return lines


def change(old: InterfacePlan, new: InterfacePlan) -> list[str]:
    """Return the lines for changing one plan's tree into another's, leaving equal leaves alone."""
    interface = new.interface
    before = {sender.number: sender for sender in old.senders}
    after = {sender.number: sender for sender in new.senders}
    lines: list[str] = []
    if old.uplink != new.uplink:
        lines.append(_tree_of(new).change_access(new.uplink))
    for number in before.keys() - after.keys():
        # The kernel refuses to remove a class that a filter still names.
        lines.append(_remove_filter(interface, before[number]))
        lines.append(_tree_of(new).remove(number))
    for number, sender in after.items():
        previous = before.get(number)
        if previous is None:
            lines += _add_class(interface, sender)
        elif previous != sender:
            lines += _change_class(interface, previous, sender)
    return lines


def _tree_of(plan: InterfacePlan) -> Tree:
    return Tree(plan.interface, _TREE_NUMBER)


def _add_filter(interface: str, sender: SenderClass) -> str:
    match = f"u32 match ip dst {sender.address}/32 flowid 1:{sender.number:x}"
    # A handle of our own choice (800 is the root hash table of u32), by which the filter can be removed later.
    return f"filter add dev {interface} parent 1: protocol ip prio 1 handle 800::{sender.number:x} {match}"


def _add_class(interface: str, sender: SenderClass) -> list[str]:
    number = f"{sender.number:x}"
    # The filter last, so that no packet enters a class without its own queue.
    return [
        Tree(interface, _TREE_NUMBER).leaf("add", sender.number, sender.rate),
        f"qdisc add dev {interface} parent 1:{number} handle {number}: pfifo limit {sender.limit}",
        _add_filter(interface, sender),
    ]


def _remove_filter(interface: str, sender: SenderClass) -> str:
    return f"filter del dev {interface} parent 1: protocol ip prio 1 handle 800::{sender.number:x} u32"


def _change_class(interface: str, old: SenderClass, new: SenderClass) -> list[str]:
    lines = []
    if old.rate != new.rate:
        lines.append(Tree(interface, _TREE_NUMBER).leaf("change", new.number, new.rate))
    if old.limit != new.limit:
        lines.append(
            f"qdisc change dev {interface} parent 1:{new.number:x} handle {new.number:x}: pfifo limit {new.limit}"
        )
    if old.address != new.address:
        # Replacing a u32 filter keeps its old match, so the filter is removed and added.
        lines += [_remove_filter(interface, old), _add_filter(interface, new)]
    return lines


def differences(
    plan: InterfacePlan,
    classes: str,
    qdiscs: Sequence[Mapping[str, Any]],
    filters: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Compare a plan with the output of ``tc class show``, ``tc -j qdisc show`` and ``tc -j filter show``.

    Returns a text for each difference.
    """
    # Lengths of queues in packets, by handle.
    limits = {}
    for entry in qdiscs:
        if entry.get("kind") == "pfifo":
            limits[entry["handle"]] = entry["options"].get("limit")
    # The class to which packets go, by destination address in hexadecimal.
    flows = {}
    for entry in filters:
        options = entry.get("options", {})
        if "match" in options:
            # tc prints the address as a number, without leading zeros.
            address = options["match"]["value"].rjust(8, "0")
            flows[address] = options.get("flowid")
    rates = [(sender.number, sender.rate) for sender in plan.senders]
    problems = _tree_of(plan).differences(classes, plan.uplink, rates)
    for sender in plan.senders:
        handle = f"{sender.number:x}:"
        limit = limits.get(handle)
        if limit != sender.limit:
            problems.append(
                f"queue {handle} holds {limit} packets instead of {sender.limit}"
            )
        flow = flows.get(inet_aton(sender.address).hex())
        if flow != f"1:{sender.number:x}":
            problems.append(
                f"packets to {sender.address} go to class {flow} instead of 1:{sender.number:x}"
            )
    return problems
