"""The receiver's side in the words of ``iptables-restore`` (backend `userspace`) and ``tc`` (`netem`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.shaping.plan import CEILING, DEFAULT_CLASS, FIRST_PEER_CLASS, Plan, ReceiverLine, burst

CHAIN = "TESTBED"
IFB = "testbed-ifb"


def chain_rules(plan: Plan) -> list[str]:
    """Return the rules of our chain as ``iptables -S`` prints them; links that change nothing have none."""
    rules = []
    for line in plan.receivers:
        if not line.link.up:
            rules.append(f"-A {CHAIN} -s {line.address}/32 -j DROP")
        elif line.impaired:
            rules.append(f"-A {CHAIN} -s {line.address}/32 -j NFQUEUE --queue-num {line.number}")
    return rules


def restore(plan: Plan) -> str:
    """Return the input for ``iptables-restore --noflush`` that replaces our chain in one step."""
    return "\n".join(["*filter", f":{CHAIN} - [0:0]", *chain_rules(plan), "COMMIT", ""])


def jump(plan: Plan) -> list[str]:
    """Return the rule that sends what the data interface receives through our chain."""
    return ["INPUT", "-i", plan.interface, "-j", CHAIN]


def chain_differences(plan: Plan, shown: str) -> list[str]:
    """Compare a plan with what ``iptables -S`` says of the filter table."""
    found = [line for line in shown.splitlines() if line.startswith(f"-A {CHAIN} ")]
    wanted = chain_rules(plan)
    problems = [f"rule is missing: {rule}" for rule in wanted if rule not in found]
    problems += [f"rule is too many: {rule}" for rule in found if rule not in wanted]
    if f"-A {' '.join(jump(plan))}" not in shown.splitlines():
        problems.append(f"the rule that leads from INPUT to {CHAIN} is missing")
    return problems


def netem(line: ReceiverLine) -> str:
    """Return the arguments of ``tc qdisc ... netem`` for one source."""
    if not line.link.up:
        return "netem loss 100%"
    words = [f"netem limit {line.limit}"]
    if line.link.delay:
        words.append(f"delay {line.link.delay * 1e6:.0f}us")
    if line.link.loss:
        words.append(f"loss random {line.link.loss * 100:.6f}%")
    return " ".join(words)


def _redirected(plan: Plan) -> dict[int, ReceiverLine]:
    return {line.number: line for line in plan.receivers if line.impaired or not line.link.up}


def _class(number: int) -> str:
    return f"{FIRST_PEER_CLASS + number:x}"


def netem_build(plan: Plan) -> list[str]:
    """Return the lines for ``tc -batch`` that lead what arrives through netem, by source; the IFB is there already."""
    device = plan.interface
    return [
        f"qdisc add dev {device} ingress",
        f"qdisc replace dev {IFB} root handle 1: htb default {DEFAULT_CLASS:x}",
        f"class add dev {IFB} parent 1: classid 1:{DEFAULT_CLASS:x} {_ceiling()}",
        *(text for line in _redirected(plan).values() for text in _netem_add(device, line)),
    ]


def netem_change(old: Plan, new: Plan) -> list[str]:
    """Return the lines that turn one plan's leaves into another's.

    A leaf that is not needed any more stays, so that packets under way in it still arrive; only the filter goes
    that leads there.
    """
    device = new.interface
    before, after = _redirected(old), _redirected(new)
    known = {line.number: line for line in old.receivers}
    lines: list[str] = []
    for number, line in after.items():
        if number not in before:
            lines += _netem_add(device, line)
        elif (before[number].address, netem(before[number])) != (line.address, netem(line)):
            if before[number].address != line.address:
                lines += _netem_remove(device, before[number])
                lines += _netem_add(device, line)
            else:
                lines.append(_netem_leaf("replace", line))
    for number in before.keys() - after.keys():
        lines += _netem_remove(device, known[number])
    return lines


def _ceiling() -> str:
    return f"htb rate {CEILING}bit ceil {CEILING}bit burst {burst(CEILING)} cburst {burst(CEILING)} quantum 60000"


def _netem_leaf(verb: str, line: ReceiverLine) -> str:
    number = _class(line.number)
    return f"qdisc {verb} dev {IFB} parent 1:{number} handle {number}: {netem(line)}"


def _netem_add(device: str, line: ReceiverLine) -> list[str]:
    number = _class(line.number)
    source = f"protocol ip prio 1 handle 800::{number} u32 match ip src {line.address}/32"
    return [
        f"class replace dev {IFB} parent 1: classid 1:{number} {_ceiling()}",
        _netem_leaf("replace", line),
        f"filter add dev {IFB} parent 1: {source} flowid 1:{number}",
        # Last, so that nothing is led into a tree that is not complete yet.
        f"filter add dev {device} parent ffff: {source} action mirred egress redirect dev {IFB}",
    ]


def _netem_remove(device: str, line: ReceiverLine) -> list[str]:
    handle = f"protocol ip prio 1 handle 800::{_class(line.number)} u32"
    return [f"filter del dev {device} parent ffff: {handle}", f"filter del dev {IFB} parent 1: {handle}"]


def netem_differences(plan: Plan, qdiscs: list[Mapping[str, Any]], filters: list[Mapping[str, Any]]) -> list[str]:
    """Compare a plan with ``tc -j qdisc show dev`` of the IFB and ``tc -j filter show`` of the ingress."""
    leaves = {entry["handle"]: entry["options"] for entry in qdiscs if entry.get("kind") == "netem"}
    led = {
        entry["options"]["match"]["value"].rjust(8, "0")
        for entry in filters
        if "match" in entry.get("options", {}) and entry["options"].get("actions")
    }
    wanted = _redirected(plan)
    problems = []
    for line in wanted.values():
        key = "".join(f"{int(part):02x}" for part in line.address.split("."))
        if key not in led:
            problems.append(f"packets from {line.address} are not led through netem")
        options = leaves.get(f"{_class(line.number)}:")
        if options is None:
            problems.append(f"no netem for {line.address}")
            continue
        loss = float(options.get("loss-random", {}).get("loss", 0.0))
        delay = float(options.get("delay", {}).get("delay", 0.0))
        asked_loss = line.link.loss if line.link.up else 1.0
        asked_delay = line.link.delay if line.link.up else 0.0
        if abs(loss - asked_loss) > 1e-6 + 1e-3 * asked_loss:
            problems.append(f"netem for {line.address} loses {loss:%} instead of {asked_loss:%}")
        if abs(delay - asked_delay) > 2e-6:
            problems.append(f"netem for {line.address} delays {delay} s instead of {asked_delay} s")
    surplus = led - {"".join(f"{int(part):02x}" for part in line.address.split(".")) for line in wanted.values()}
    problems += [f"packets from {key} (hexadecimal) are led through netem for no link" for key in surplus]
    return problems
