"""The receiver's side in the words of ``iptables-restore``, for backend `userspace`. Pure."""

from __future__ import annotations

from controller.shaping.plan import InterfacePlan

CHAIN = "TESTBED"


def chain_rules(plan: InterfacePlan) -> list[str]:
    """Return the rules of our chain as ``iptables -S`` prints them; links that change nothing have none."""
    rules = []
    for line in plan.receivers:
        if not line.link.up:
            rules.append(f"-A {CHAIN} -s {line.address}/32 -j DROP")
        elif line.queued:
            rules.append(f"-A {CHAIN} -s {line.address}/32 -j NFQUEUE --queue-num {line.number}")
    return rules


def restore(plan: InterfacePlan) -> str:
    """Return the input for ``iptables-restore --noflush`` that replaces our chain in one step."""
    return "\n".join(["*filter", f":{CHAIN} - [0:0]", *chain_rules(plan), "COMMIT", ""])


def jump(plan: InterfacePlan) -> list[str]:
    """Return the rule that sends what the data interface receives through our chain."""
    return ["INPUT", "-i", plan.interface, "-j", CHAIN]


def chain_differences(plan: InterfacePlan, shown: str) -> list[str]:
    """Compare a plan with what ``iptables -S`` says of the filter table."""
    found = [line for line in shown.splitlines() if line.startswith(f"-A {CHAIN} ")]
    wanted = chain_rules(plan)
    problems = [f"rule is missing: {rule}" for rule in wanted if rule not in found]
    problems += [f"rule is too many: {rule}" for rule in found if rule not in wanted]
    if f"-A {' '.join(jump(plan))}" not in shown.splitlines():
        problems.append(f"the rule that leads from INPUT to {CHAIN} is missing")
    return problems
