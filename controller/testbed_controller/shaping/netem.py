"""The receiving side as ``tc`` commands, for backend `netem`. Pure functions.

Arriving packets are redirected by source to an intermediate device (IFB), whose HTB tree has one netem per source below
the class of the device's downlink. A duplicating link has its own IFB: recent kernels refuse a duplicating netem beside
any other on one device, and older ones can loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from socket import inet_aton
from typing import Any

from testbed.network.impairments import QUANTILES, chain, quantiles
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
_TREE = Tree(IFB, 2)
_ROOT = f"{_TREE.number}:"
_INNER = 0x2000
"""Offset of the handles of queues before a downlink from those of their netems."""
_TABLE_UNIT = 8192
_DRAINING = 20_000
"""Limit, in packets, of a queue after its downlink was lifted, so that none is lost while draining."""


def problem(link: Link, access: Access | None) -> str | None:
    """Return a property of a link without support in netem, with a remedy, or None."""
    if link.up and link.jitter_correlation:
        # The kernel reduces a correlated number to its lowest bits, which have no correlation left.
        return "netem cannot correlate successive delays: use --links userspace"
    if link.up and link.duplicate and access is not None:
        return "netem cannot duplicate before a downlink: use --links userspace, or remove downlink or duplicate"
    return None


def table(distribution: Distribution) -> str:
    """Return a delay distribution as a ``.dist`` file for ``tc``."""
    values = [round(value * _TABLE_UNIT) for value in quantiles(distribution)]
    lines = (values[first : first + 8] for first in range(0, QUANTILES, 8))
    return "".join(" ".join(map(str, line)) + "\n" for line in lines)


def netem_arguments(line: ReceiverLine) -> str:
    """Return the arguments of ``tc qdisc ... netem`` for one source.

    A change keeps only the corruption if it is omitted, so corruption is always given; all other properties reset.
    """
    link = line.link
    if not link.up:
        return "netem limit 1000 loss random 100% corrupt 0%"
    words = [f"netem limit {line.limit}"]
    if link.delay:
        words.append(f"delay {link.delay * 1e6:.0f}us")
    if link.jitter:
        words.append(f"{link.jitter * 1e6:.0f}us distribution {link.distribution}")
    if states := chain(link):
        figures = (states.p, states.r, states.bad_loss, states.good_loss)
        words.append("loss gemodel " + " ".join(map(_format_percent, figures)))
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
    return {
        line.number: line for line in plan.receivers if line.queued or not line.link.up
    }


def device_of(line: ReceiverLine) -> str:
    """Return the IFB for a source's packets."""
    return f"testbed-ifb{line.number}" if line.link.up and line.link.duplicate else IFB


def devices(plan: InterfacePlan) -> set[str]:
    """Return the IFBs of a plan."""
    return {IFB, *(device_of(line) for line in _redirected_lines(plan).values())}


def build(plan: InterfacePlan) -> list[str]:
    """Return the ``tc -batch`` lines leading arriving packets through netem by source; the IFBs must exist."""
    lines = [f"qdisc add dev {plan.interface} ingress", *_TREE.root(plan.downlink)]
    for line in _redirected_lines(plan).values():
        lines += _add_source(plan, line)
    return lines


def change(old: InterfacePlan, new: InterfacePlan) -> list[str]:
    """Return the lines for changing one plan's leaves into another's; new IFBs must exist.

    An unneeded leaf stays, so that packets in transit still arrive; only its filter is removed.
    """
    before, after = _redirected_lines(old), _redirected_lines(new)
    lines: list[str] = []
    if old.downlink != new.downlink:
        lines.append(_TREE.change_access(new.downlink))
    for number, line in after.items():
        previous = before.get(number)
        if previous is None:
            lines += _add_source(new, line)
        elif (previous.address, device_of(previous)) != (line.address, device_of(line)):
            lines += [
                *_leaf_commands(new, line),
                *_remove_filter(old, previous),
                *_add_filter(new, line),
            ]
        else:
            if netem_arguments(previous) != netem_arguments(line):
                lines.append(_netem_command(line))
            if old.downlink != new.downlink:
                lines += _queue_commands(new, line)
    for number in before.keys() - after.keys():
        lines += _remove_filter(old, before[number])
    return lines


def _class_number(line: ReceiverLine) -> int:
    return FIRST_PEER_CLASS + line.number


def _netem_command(line: ReceiverLine) -> str:
    device, number = device_of(line), _class_number(line)
    place = f"parent {_TREE.identity(number)}" if device == IFB else "root"
    return (
        f"qdisc replace dev {device} {place} handle {number:x}: {netem_arguments(line)}"
    )


def _queue_commands(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    """Return the commands for the queue before the downlink, after the delay."""
    number = _class_number(line)
    limit = plan.downlink.limit if plan.downlink else _DRAINING
    return [
        f"qdisc replace dev {IFB} parent {number:x}:1 handle {_INNER + number:x}: pfifo limit {limit}"
    ]


def _leaf_commands(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    if device_of(line) != IFB:
        return [_netem_command(line)]
    queue = _queue_commands(plan, line) if plan.downlink else []
    return [
        _TREE.leaf("replace", _class_number(line), CEILING),
        _netem_command(line),
        *queue,
    ]


def _add_filter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    number, device = _class_number(line), device_of(line)
    source = (
        f"protocol ip prio 1 handle 800::{number:x} u32 match ip src {line.address}/32"
    )
    leads = (
        [
            f"filter add dev {IFB} parent {_ROOT} {source} flowid {_TREE.identity(number)}"
        ]
        if device == IFB
        else []
    )
    # The redirecting filter is last, so that no packet enters an incomplete tree.
    return [
        *leads,
        f"filter add dev {plan.interface} parent ffff: {source} action mirred egress redirect dev {device}",
    ]


def _add_source(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    return [*_leaf_commands(plan, line), *_add_filter(plan, line)]


def _remove_filter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    handle = f"protocol ip prio 1 handle 800::{_class_number(line):x} u32"
    lines = [f"filter del dev {plan.interface} parent ffff: {handle}"]
    return (
        [*lines, f"filter del dev {IFB} parent {_ROOT} {handle}"]
        if device_of(line) == IFB
        else lines
    )


def differences(
    plan: InterfacePlan,
    classes: str,
    qdiscs: Sequence[Mapping[str, Any]],
    filters: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Compare a plan with ``tc class show`` of the IFB, ``tc -j qdisc show``, and the ingress filters.

    The delay distribution is not compared, since the kernel does not report it.
    """
    wanted = _redirected_lines(plan)
    shared = [line for line in wanted.values() if device_of(line) == IFB]
    problems = _TREE.differences(
        classes, plan.downlink, ((_class_number(line), CEILING) for line in shared)
    )
    options_by_handle = {
        (entry.get("dev"), entry["handle"]): entry["options"]
        for entry in qdiscs
        if "handle" in entry
    }
    redirected = _redirections(filters)
    for line in wanted.values():
        device, where = (
            device_of(line),
            redirected.pop(inet_aton(line.address).hex(), None),
        )
        if where != device:
            problems.append(
                f"packets from {line.address} are redirected to {where} instead of {device}"
            )
        options = options_by_handle.get((device, f"{_class_number(line):x}:"))
        if options is None:
            problems.append(f"no netem for {line.address}")
            continue
        problems += [
            f"netem for {line.address} {text}"
            for text in _netem_differences(line, options)
        ]
        inner = options_by_handle.get((IFB, f"{_INNER + _class_number(line):x}:"), {})
        if plan.downlink and inner.get("limit") != plan.downlink.limit:
            problems.append(
                f"the queue of {line.address} before the downlink holds {inner.get('limit')} packets"
            )
    return problems + [
        f"packets from {key} (hexadecimal) are redirected without a link"
        for key in redirected
    ]


def _redirections(filters: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the target device of redirected packets, by source address in hexadecimal."""
    devices = {}
    for entry in filters:
        options = entry.get("options", {})
        if "match" in options:
            actions = options.get("actions") or [{}]
            devices[options["match"]["value"].rjust(8, "0")] = actions[0].get("to_dev")
    return devices


def _netem_differences(line: ReceiverLine, held: Mapping[str, Any]) -> list[str]:
    link = line.link if line.link.up else Link(loss=1.0)
    delay, bursts = held.get("delay", {}), held.get("loss-gemodel", {})
    states, loss, chances = chain(link), link.loss, (0.0, 0.0, 0.0, 0.0)
    if states is not None:
        loss, chances = 0.0, (states.p, states.r, states.bad_loss, states.good_loss)
    compared = [
        (
            "holds {} packets instead of {}",
            held.get("limit"),
            line.limit if line.link.up else 1000,
            0.0,
        ),
        ("delays by {} s instead of {} s", delay.get("delay", 0.0), link.delay, 1e-6),
        (
            "jitters by {} s instead of {} s",
            delay.get("jitter", 0.0),
            link.jitter,
            1e-6,
        ),
        (
            "loses {} instead of {}",
            held.get("loss-random", {}).get("loss", 0.0),
            loss,
            1e-5,
        ),
        ("goes bad with {} instead of {}", bursts.get("p", 0.0), chances[0], 1e-5),
        ("goes good with {} instead of {}", bursts.get("r", 0.0), chances[1], 1e-5),
        ("loses {} of the bad instead of {}", bursts.get("1-h", 0.0), chances[2], 1e-5),
        (
            "loses {} of the good instead of {}",
            bursts.get("1-k", 0.0),
            chances[3],
            1e-5,
        ),
    ]
    for name in ("duplicate", "reorder", "corrupt"):
        rate = held.get(name, {}).get(name, 0.0)
        if name == "reorder" and not held.get("gap"):
            rate = 0.0  # the kernel still shows an earlier setting, but ignores it without a gap
        compared.append(
            (f"has a {name} of {{}} instead of {{}}", rate, getattr(link, name), 1e-5)
        )
    return [
        text.format(is_now, asked)
        for text, is_now, asked, tolerance in compared
        if is_now is None or abs(is_now - asked) > tolerance + 1e-4 * abs(asked)
    ]
