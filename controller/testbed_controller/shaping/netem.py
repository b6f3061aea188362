"""The receiving side as ``tc`` commands, for backend `netem`. Pure functions.

The kernel queues only packets that leave an interface. Filters therefore redirect the packets that arrive at a device
to an intermediate device (IFB), an interface that they leave again. Its HTB tree has one leaf per source: a class below
the class of the downlink, with a netem, the kernel's emulator of delays and losses. With a downlink, a queue follows
the netem.

A link with duplicates has an IFB of its own: recent kernels refuse a duplicating netem beside any other on one
interface, and older ones can loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from socket import inet_aton
from typing import Any

from testbed.network.impairments import QUANTILES, loss_chain, quantiles
from testbed.network.link import Distribution, Link
from testbed_controller.shaping.plan import (
    CEILING,
    FIRST_PEER_CLASS,
    Access,
    InterfacePlan,
    ReceiverLine,
)
from testbed_controller.shaping.tc import Tree

IFB = "testbed-ifb"
"""Name of the IFB for all links without duplicates, and the beginning of the other IFBs' names."""
# The sending side has the tree with number 1.
_TREE = Tree(IFB, 2)
_ROOT = f"{_TREE.number}:"
_DOWN_LIMIT = 1000
"""Limit in packets of the netem of a link that is down, which drops every packet; this is netem's default."""
_QUEUE_HANDLE_OFFSET = 0x2000
"""Added to the handle of a netem, the result is the handle of the queue before the downlink."""
_TABLE_UNIT = 8192
"""Value that netem's distribution tables have for one standard deviation."""
_DRAINING_LIMIT = 20_000
"""Limit of a queue in packets after its downlink was lifted, so that no packet is lost while the queue empties."""


def unsupported_property(link: Link, access: Access | None) -> str | None:
    """Return a property of a link which netem cannot emulate, with a remedy; None for a supported link.

    ``access`` is the downlink of the receiver.

    >>> unsupported_property(Link(delay=0.01, jitter=0.001), None) is None
    True
    """
    if link.up and link.jitter_correlation:
        # The kernel reduces a correlated number to its lowest bits, which have no correlation left.
        return "netem cannot correlate successive delays: use --links userspace"
    if link.up and link.duplicate and access is not None:
        return "netem cannot duplicate before a downlink: use --links userspace, or remove downlink or duplicate"
    return None


def distribution_table(distribution: Distribution) -> str:
    """Return a delay distribution as a ``.dist`` file for ``tc``, in units of 1/8192 standard deviation."""
    values = [str(round(value * _TABLE_UNIT)) for value in quantiles(distribution)]
    text = ""
    for first in range(0, QUANTILES, 8):
        text += " ".join(values[first : first + 8]) + "\n"
    return text


def netem_arguments(line: ReceiverLine) -> str:
    """Return the arguments of ``tc qdisc ... netem`` for one source.

    Corruption is always included, since a changed netem keeps an omitted one; all other omitted properties are reset.

    >>> line = ReceiverLine(1, "10.0.0.2", Link(delay=0.005, loss=0.01), limit=10000, queued=True)
    >>> netem_arguments(line)
    'netem limit 10000 delay 5000us loss random 1% corrupt 0%'
    """
    link = line.link
    if not link.up:
        return f"netem limit {_DOWN_LIMIT} loss random 100% corrupt 0%"
    words = [f"netem limit {line.limit}"]
    if link.delay:
        words.append(f"delay {link.delay * 1e6:.0f}us")
    if link.jitter:
        words.append(f"{link.jitter * 1e6:.0f}us distribution {link.distribution}")
    states = loss_chain(link)
    if states is not None:
        # netem's own `loss random P C` would not keep the share of losses (docs/fidelity.md).
        chances = (states.p, states.r, states.bad_loss, states.good_loss)
        words.append("loss gemodel " + " ".join(map(_format_percent, chances)))
    elif link.loss:
        words.append(f"loss random {_format_percent(link.loss)}")
    if link.duplicate:
        words.append(f"duplicate {_format_percent(link.duplicate)}")
    if link.reorder:
        words.append(f"reorder {_format_percent(link.reorder)}")
    words.append(f"corrupt {_format_percent(link.corrupt)}")
    return " ".join(words)


def _format_percent(fraction: float) -> str:
    return f"{100 * fraction:.6f}".rstrip("0").rstrip(".") + "%"


def _redirected_lines(plan: InterfacePlan) -> dict[int, ReceiverLine]:
    """Return the lines of sources whose packets are redirected, by number."""
    # A link that is down needs a netem too, which drops all its packets. An unimpaired link needs none.
    lines = {}
    for line in plan.receivers:
        if line.queued or not line.link.up:
            lines[line.number] = line
    return lines


def ifb_of(line: ReceiverLine) -> str:
    """Return the name of the IFB for a source's packets."""
    if line.link.up and line.link.duplicate:
        return f"{IFB}{line.number}"
    return IFB


def ifbs_of(plan: InterfacePlan) -> set[str]:
    """Return the names of the IFBs needed by a plan."""
    names = {IFB}
    for line in _redirected_lines(plan).values():
        names.add(ifb_of(line))
    return names


def build(plan: InterfacePlan) -> list[str]:
    """Return the ``tc -batch`` commands that lead arriving packets through netem by source; the IFBs must exist."""
    commands = [f"qdisc add dev {plan.interface} ingress", *_TREE.root(plan.downlink)]
    for line in _redirected_lines(plan).values():
        commands += _add_source(plan, line)
    return commands


def change(old: InterfacePlan, new: InterfacePlan) -> list[str]:
    """Return the commands for changing one plan's leaves into another's; new IFBs must exist.

    An unneeded leaf stays, so that packets in transit still arrive; only its filter is removed.
    """
    before = _redirected_lines(old)
    after = _redirected_lines(new)
    commands: list[str] = []
    if old.downlink != new.downlink:
        commands.append(_TREE.change_access(new.downlink))
    for number, line in after.items():
        previous = before.get(number)
        if previous is None:
            commands += _add_source(new, line)
        elif previous.address != line.address or ifb_of(previous) != ifb_of(line):
            # The new leaf is complete before a filter leads packets to it.
            commands += _leaf_commands(new, line)
            commands += _remove_filter(old, previous)
            commands += _add_filter(new, line)
        else:
            if netem_arguments(previous) != netem_arguments(line):
                commands.append(_netem_command(line))
            if old.downlink != new.downlink:
                commands.append(_queue_command(new, line))
    for number in before.keys() - after.keys():
        commands += _remove_filter(old, before[number])
    return commands


def _class_number(line: ReceiverLine) -> int:
    """Return the number of the leaf's class, which is also the handle of the netem and of the filters."""
    return FIRST_PEER_CLASS + line.number


def _netem_command(line: ReceiverLine) -> str:
    ifb = ifb_of(line)
    number = _class_number(line)
    place = f"parent {_TREE.identity(number)}" if ifb == IFB else "root"
    return f"qdisc replace dev {ifb} {place} handle {number:x}: {netem_arguments(line)}"


def _queue_command(plan: InterfacePlan, line: ReceiverLine) -> str:
    """Return the command for the queue behind the netem and before the downlink."""
    number = _class_number(line)
    limit = plan.downlink.limit if plan.downlink else _DRAINING_LIMIT
    handle = _QUEUE_HANDLE_OFFSET + number
    return f"qdisc replace dev {IFB} parent {number:x}:1 handle {handle:x}: pfifo limit {limit}"


def _leaf_commands(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    if ifb_of(line) != IFB:
        return [_netem_command(line)]
    commands = [
        _TREE.leaf("replace", _class_number(line), CEILING),
        _netem_command(line),
    ]
    if plan.downlink:
        commands.append(_queue_command(plan, line))
    return commands


def _add_filter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    number = _class_number(line)
    ifb = ifb_of(line)
    source = (
        f"protocol ip prio 1 handle 800::{number:x} u32 match ip src {line.address}/32"
    )
    commands = []
    if ifb == IFB:
        identity = _TREE.identity(number)
        to_class = f"parent {_ROOT} {source} flowid {identity}"
        commands.append(f"filter add dev {IFB} {to_class}")
    # The redirecting filter is last, so that no packet enters an incomplete tree.
    redirect = f"action mirred egress redirect dev {ifb}"
    commands.append(f"filter add dev {plan.interface} parent ffff: {source} {redirect}")
    return commands


def _add_source(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    return [*_leaf_commands(plan, line), *_add_filter(plan, line)]


def _remove_filter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    handle = f"protocol ip prio 1 handle 800::{_class_number(line):x} u32"
    commands = [f"filter del dev {plan.interface} parent ffff: {handle}"]
    if ifb_of(line) == IFB:
        commands.append(f"filter del dev {IFB} parent {_ROOT} {handle}")
    return commands


def differences(
    plan: InterfacePlan,
    classes: str,
    qdiscs: Sequence[Mapping[str, Any]],
    filters: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Compare a plan with ``tc class show`` of the IFB, ``tc -j qdisc show``, and the ingress filters.

    The delay distribution is not compared, since the kernel does not report it.
    """
    lines = _redirected_lines(plan)
    rates = []
    for line in lines.values():
        if ifb_of(line) == IFB:
            rates.append((_class_number(line), CEILING))
    problems = _TREE.differences(classes, plan.downlink, rates)
    options_by_handle = {}
    for entry in qdiscs:
        if "handle" in entry:
            options_by_handle[entry.get("dev"), entry["handle"]] = entry["options"]
    redirections = _redirections(filters)
    for line in lines.values():
        ifb = ifb_of(line)
        target = redirections.pop(inet_aton(line.address).hex(), None)
        if target != ifb:
            problems.append(
                f"packets from {line.address} are redirected to {target} instead of {ifb}"
            )
        problems += _line_differences(plan, line, options_by_handle)
    # Only redirections that no line needs are left.
    for source in redirections:
        problems.append(
            f"packets from {source} (hexadecimal) are redirected without a link"
        )
    return problems


def _line_differences(
    plan: InterfacePlan,
    line: ReceiverLine,
    options_by_handle: Mapping[tuple[str | None, str], Mapping[str, Any]],
) -> list[str]:
    """Compare the netem of one source, and the queue behind it, with the kernel's state."""
    number = _class_number(line)
    options = options_by_handle.get((ifb_of(line), f"{number:x}:"))
    if options is None:
        return [f"no netem for {line.address}"]
    problems = [
        f"netem for {line.address} {text}" for text in _netem_differences(line, options)
    ]
    queue = options_by_handle.get((IFB, f"{_QUEUE_HANDLE_OFFSET + number:x}:"), {})
    limit = queue.get("limit")
    if plan.downlink and limit != plan.downlink.limit:
        problems.append(
            f"the queue of {line.address} before the downlink holds {limit} packets instead of {plan.downlink.limit}"
        )
    return problems


def _redirections(filters: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the target interface of redirected packets, by source address in hexadecimal."""
    targets = {}
    for entry in filters:
        options = entry.get("options", {})
        if "match" in options:
            # tc prints the address as a number, without leading zeros.
            source = options["match"]["value"].rjust(8, "0")
            actions = options.get("actions") or [{}]
            targets[source] = actions[0].get("to_dev")
    return targets


def _netem_differences(line: ReceiverLine, observed: Mapping[str, Any]) -> list[str]:
    """Compare the options of one netem, as printed by ``tc -j``, with a line."""
    # A link that is down has the netem of `netem_arguments`: it loses all packets.
    link = line.link if line.link.up else Link(loss=1.0)
    limit = line.limit if line.link.up else _DOWN_LIMIT
    delay = observed.get("delay", {})
    loss = observed.get("loss-random", {}).get("loss", 0.0)
    # Keys and tolerances of the kernel's Gilbert-Elliott model: p, r, 1-h and 1-k of netem's manual page.
    bursts = observed.get("loss-gemodel", {})
    states = loss_chain(link)
    wanted_loss = link.loss
    chances = (0.0, 0.0, 0.0, 0.0)
    if states is not None:
        wanted_loss = 0.0
        chances = (states.p, states.r, states.bad_loss, states.good_loss)
    # Description, value in the kernel, wanted value, tolerance: microseconds, and 32-bit fractions.
    compared = [
        ("{} packets in transit at most", observed.get("limit"), limit, 0.0),
        ("delay {} s", delay.get("delay", 0.0), link.delay, 1e-6),
        ("jitter {} s", delay.get("jitter", 0.0), link.jitter, 1e-6),
        ("loss {}", loss, wanted_loss, 1e-5),
        ("transition to the bad state {}", bursts.get("p", 0.0), chances[0], 1e-5),
        ("transition to the good state {}", bursts.get("r", 0.0), chances[1], 1e-5),
        ("loss in the bad state {}", bursts.get("1-h", 0.0), chances[2], 1e-5),
        ("loss in the good state {}", bursts.get("1-k", 0.0), chances[3], 1e-5),
    ]
    for name in ("duplicate", "reorder", "corrupt"):
        fraction = observed.get(name, {}).get(name, 0.0)
        if name == "reorder" and not observed.get("gap"):
            fraction = 0.0  # the kernel still shows an earlier setting, but ignores it without a gap
        compared.append((f"{name} {{}}", fraction, getattr(link, name), 1e-5))
    problems = []
    for text, present, wanted, tolerance in compared:
        if present is None or abs(present - wanted) > tolerance + 1e-4 * abs(wanted):
            problems.append(f"has {text.format(present)} instead of {wanted}")
    return problems
