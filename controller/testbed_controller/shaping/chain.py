"""A chain of rules of our own in the filter table of iptables, and the rule that leads into it."""

from __future__ import annotations

from dataclasses import dataclass

from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import InterfacePlan


@dataclass(frozen=True)
class RuleChain:
    """What the kernel is to hold. In the words of ``iptables-restore``, so that one step replaces all rules."""

    name: str
    entry: tuple[str, ...]
    """The chain of the kernel that leads here, and with which packets: ``("INPUT", "-i", "eth1")``."""
    rules: tuple[str, ...]
    """What follows the chain's name, as ``iptables -S`` prints it."""

    @property
    def lines(self) -> list[str]:
        """The rules as ``iptables -S`` prints them."""
        return [f"-A {self.name} {rule}" for rule in self.rules]

    def restore(self) -> str:
        """Return the input for ``iptables-restore --noflush`` that replaces all rules."""
        return "\n".join(["*filter", f":{self.name} - [0:0]", *self.lines, "COMMIT", ""])

    def _jump(self) -> str:
        return f"-A {' '.join(self.entry)} -j {self.name}"

    def apply(self, iptables: str, before: RuleChain | None) -> None:
        """Replace what was applied in the calling thread's namespace; without that, also lead packets here."""
        if before is None or before.rules != self.rules:
            command([f"{iptables}-restore", "-w", "--noflush"], self.restore())
        if before is None and self._jump() not in command([iptables, "-w", "-S", self.entry[0]]).splitlines():
            command([iptables, "-w", "-I", *self.entry, "-j", self.name])

    def differences(self, shown: str) -> list[str]:
        """Compare with what ``iptables -S`` says of the filter table."""
        lines = shown.splitlines()
        found = [line for line in lines if line.startswith(f"-A {self.name} ")]
        problems = [f"rule is missing: {rule}" for rule in self.lines if rule not in found]
        problems += [f"rule is too many: {rule}" for rule in found if rule not in self.lines]
        if self._jump() not in lines:
            problems.append(f"the rule that leads from {self.entry[0]} to {self.name} is missing")
        return problems


def receiving(plan: InterfacePlan) -> RuleChain:
    """Return the chain of the receiver's side, for backend `userspace`; links that change nothing have no rule."""
    rules = []
    for line in plan.receivers:
        if not line.link.up:
            rules.append(f"-s {line.address}/32 -j DROP")
        elif line.queued:
            rules.append(f"-s {line.address}/32 -j NFQUEUE --queue-num {line.number}")
    return RuleChain("TESTBED", ("INPUT", "-i", plan.interface), tuple(rules))
