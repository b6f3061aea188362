"""The receiver's side in the words of ``tc``, for backend `netem`. Pure.

What arrives is redirected by source to an intermediate device (IFB), where an HTB tree holds one netem per source
below the class of the device's downlink. A link that duplicates has an IFB to itself: recent kernels refuse a netem
that duplicates beside any other on one device, and older ones can loop there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from socket import inet_aton
from typing import Any

from testbed.network.impairments import QUANTILES, chain, quantiles
from testbed.network.link import Distribution, Link
from testbed_controller.shaping.plan import CEILING, FIRST_PEER_CLASS, Access, InterfacePlan, ReceiverLine
from testbed_controller.shaping.tc import Tree

IFB = "testbed-ifb"
_TREE = Tree(IFB, 2)
_ROOT = f"{_TREE.number}:"
_INNER = 0x2000
"""Handles of the queues before a downlink are those of their netems and this much more."""
_TABLE_UNIT = 8192
_DRAINING = 20_000
"""Packets: the limit of a queue whose downlink was lifted, so that none is lost on leaving it."""


def problem(link: Link, access: Access | None) -> str | None:
    """Say what of a link netem cannot do, and what can; None where it can do all."""
    if link.up and link.jitter_correlation:
        # It folds a correlated number down to its lowest bits, in which no correlation is left.
        return "netem does not correlate successive delays, whatever it is given: use --links userspace"
    if link.up and link.duplicate and access is not None:
        return "netem cannot duplicate before a downlink: use --links userspace, or leave the downlink or that out"
    return None


def table(distribution: Distribution) -> str:
    """Return a distribution as ``tc`` reads it from a ``.dist`` file."""
    values = [round(value * _TABLE_UNIT) for value in quantiles(distribution)]
    lines = (values[first : first + 8] for first in range(0, QUANTILES, 8))
    return "".join(" ".join(map(str, line)) + "\n" for line in lines)


def netem_arguments(line: ReceiverLine) -> str:
    """Return the arguments of ``tc qdisc ... netem`` for one source.

    Changing a netem keeps what is not named: corruption is, even where there is none, and the rest starts again by
    itself.
    """
    link = line.link
    if not link.up:
        return "netem limit 1000 loss random 100% corrupt 0%"
    said = [f"netem limit {line.limit}"]
    if link.delay:
        said.append(f"delay {link.delay * 1e6:.0f}us")
    if link.jitter:
        said.append(f"{link.jitter * 1e6:.0f}us distribution {link.distribution}")
    if states := chain(link):
        figures = (states.p, states.r, states.bad_loss, states.good_loss)
        said.append("loss gemodel " + " ".join(map(_percent, figures)))
    elif link.loss:
        said.append(f"loss random {_percent(link.loss)}")
    if link.duplicate:
        said.append(f"duplicate {_percent(link.duplicate)}")
    if link.reorder:
        said.append(f"reorder {_percent(link.reorder)}")
    said.append(f"corrupt {_percent(link.corrupt)}")
    return " ".join(said)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.6f}".rstrip("0").rstrip(".") + "%"


def _redirected(plan: InterfacePlan) -> dict[int, ReceiverLine]:
    return {line.number: line for line in plan.receivers if line.queued or not line.link.up}


def device_of(line: ReceiverLine) -> str:
    """Return the IFB that a source's packets pass."""
    return f"testbed-ifb{line.number}" if line.link.up and line.link.duplicate else IFB


def devices(plan: InterfacePlan) -> set[str]:
    """Return the IFBs that a plan needs."""
    return {IFB, *(device_of(line) for line in _redirected(plan).values())}


def build(plan: InterfacePlan) -> list[str]:
    """Return the lines for ``tc -batch`` that lead what arrives through netem, by source; the IFBs are there."""
    return [
        f"qdisc add dev {plan.interface} ingress",
        *_TREE.root(plan.downlink),
        *(text for line in _redirected(plan).values() for text in _add(plan, line)),
    ]


def change(old: InterfacePlan, new: InterfacePlan) -> list[str]:
    """Return the lines that turn one plan's leaves into another's; new IFBs are there already.

    A leaf that is not needed any more stays, so that packets under way in it still arrive; only the filter goes
    that leads there.
    """
    before, after = _redirected(old), _redirected(new)
    lines: list[str] = []
    if old.downlink != new.downlink:
        lines.append(_TREE.change_access(new.downlink))
    for number, line in after.items():
        previous = before.get(number)
        if previous is None:
            lines += _add(new, line)
        elif (previous.address, device_of(previous)) != (line.address, device_of(line)):
            lines += [*_leaf(new, line), *_unfilter(old, previous), *_filter(new, line)]
        else:
            if netem_arguments(previous) != netem_arguments(line):
                lines.append(_netem(line))
            if old.downlink != new.downlink:
                lines += _queue(new, line)
    for number in before.keys() - after.keys():
        lines += _unfilter(old, before[number])
    return lines


def _class(line: ReceiverLine) -> int:
    return FIRST_PEER_CLASS + line.number


def _netem(line: ReceiverLine) -> str:
    device, number = device_of(line), _class(line)
    place = f"parent {_TREE.identity(number)}" if device == IFB else "root"
    return f"qdisc replace dev {device} {place} handle {number:x}: {netem_arguments(line)}"


def _queue(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    """Return what makes packets whose delay is over wait for the downlink in a queue of its own length."""
    number = _class(line)
    limit = plan.downlink.limit if plan.downlink else _DRAINING
    return [f"qdisc replace dev {IFB} parent {number:x}:1 handle {_INNER + number:x}: pfifo limit {limit}"]


def _leaf(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    if device_of(line) != IFB:
        return [_netem(line)]
    queue = _queue(plan, line) if plan.downlink else []
    return [_TREE.leaf("replace", _class(line), CEILING), _netem(line), *queue]


def _filter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    number, device = _class(line), device_of(line)
    source = f"protocol ip prio 1 handle 800::{number:x} u32 match ip src {line.address}/32"
    leads = [f"filter add dev {IFB} parent {_ROOT} {source} flowid {_TREE.identity(number)}"] if device == IFB else []
    # Last, so that nothing is led into a tree that is not complete yet.
    return [*leads, f"filter add dev {plan.interface} parent ffff: {source} action mirred egress redirect dev {device}"]


def _add(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    return [*_leaf(plan, line), *_filter(plan, line)]


def _unfilter(plan: InterfacePlan, line: ReceiverLine) -> list[str]:
    handle = f"protocol ip prio 1 handle 800::{_class(line):x} u32"
    lines = [f"filter del dev {plan.interface} parent ffff: {handle}"]
    return [*lines, f"filter del dev {IFB} parent {_ROOT} {handle}"] if device_of(line) == IFB else lines


def differences(
    plan: InterfacePlan, classes: str, qdiscs: Sequence[Mapping[str, Any]], filters: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Compare a plan with ``tc class show`` of the IFB, ``tc -j qdisc show``, and the filters at the ingress.

    All but the distribution, which the kernel does not report.
    """
    wanted = _redirected(plan)
    shared = [line for line in wanted.values() if device_of(line) == IFB]
    problems = _TREE.differences(classes, plan.downlink, ((_class(line), CEILING) for line in shared))
    held = {(entry.get("dev"), entry["handle"]): entry["options"] for entry in qdiscs if "handle" in entry}
    redirected = _redirections(filters)
    for line in wanted.values():
        device, where = device_of(line), redirected.pop(inet_aton(line.address).hex(), None)
        if where != device:
            problems.append(f"packets from {line.address} are led to {where} instead of {device}")
        options = held.get((device, f"{_class(line):x}:"))
        if options is None:
            problems.append(f"no netem for {line.address}")
            continue
        problems += [f"netem for {line.address} {text}" for text in _netem_differences(line, options)]
        inner = held.get((IFB, f"{_INNER + _class(line):x}:"), {})
        if plan.downlink and inner.get("limit") != plan.downlink.limit:
            problems.append(f"the queue of {line.address} before the downlink holds {inner.get('limit')} packets")
    return problems + [f"packets from {key} (hexadecimal) are led through netem for no link" for key in redirected]


def _redirections(filters: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the device that packets are led to, by their source in hexadecimal."""
    found = {}
    for entry in filters:
        options = entry.get("options", {})
        if "match" in options:
            actions = options.get("actions") or [{}]
            found[options["match"]["value"].rjust(8, "0")] = actions[0].get("to_dev")
    return found


def _netem_differences(line: ReceiverLine, held: Mapping[str, Any]) -> list[str]:
    link = line.link if line.link.up else Link(loss=1.0)
    delay, bursts = held.get("delay", {}), held.get("loss-gemodel", {})
    states, loss, chances = chain(link), link.loss, (0.0, 0.0, 0.0, 0.0)
    if states is not None:
        loss, chances = 0.0, (states.p, states.r, states.bad_loss, states.good_loss)
    compared = [
        ("holds {} packets instead of {}", held.get("limit"), line.limit if line.link.up else 1000, 0.0),
        ("delays by {} s instead of {} s", delay.get("delay", 0.0), link.delay, 1e-6),
        ("jitters by {} s instead of {} s", delay.get("jitter", 0.0), link.jitter, 1e-6),
        ("loses {} instead of {}", held.get("loss-random", {}).get("loss", 0.0), loss, 1e-5),
        ("goes bad with {} instead of {}", bursts.get("p", 0.0), chances[0], 1e-5),
        ("goes good with {} instead of {}", bursts.get("r", 0.0), chances[1], 1e-5),
        ("loses {} of the bad instead of {}", bursts.get("1-h", 0.0), chances[2], 1e-5),
        ("loses {} of the good instead of {}", bursts.get("1-k", 0.0), chances[3], 1e-5),
    ]
    for name in ("duplicate", "reorder", "corrupt"):
        rate = held.get(name, {}).get(name, 0.0)
        if name == "reorder" and not held.get("gap"):
            rate = 0.0  # what an earlier setting left is shown still, but without a gap not heeded
        compared.append((f"has a {name} of {{}} instead of {{}}", rate, getattr(link, name), 1e-5))
    return [
        text.format(is_now, asked)
        for text, is_now, asked, tolerance in compared
        if is_now is None or abs(is_now - asked) > tolerance + 1e-4 * abs(asked)
    ]
