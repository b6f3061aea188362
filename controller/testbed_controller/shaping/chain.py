"""A chain of iptables rules that only the shaper changes, and the rule of a built-in chain that jumps to it."""

from __future__ import annotations

from dataclasses import dataclass

from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import InterfacePlan


@dataclass(frozen=True)
class RuleChain:
    """The desired rules of a chain, in the syntax of iptables.

    >>> chain = RuleChain("TESTBED", ("INPUT", "-i", "eth0"), ("-s 10.0.0.2/32 -j DROP",))
    >>> chain.lines
    ['-A TESTBED -s 10.0.0.2/32 -j DROP']
    """

    name: str
    entry: tuple[str, ...]
    """Built-in chain and match of the entry rule, which jumps to this chain: ``("INPUT", "-i", "eth1")``."""
    rules: tuple[str, ...]
    """Rules without the chain's name, as printed by ``iptables -S``."""

    @property
    def lines(self) -> list[str]:
        """The rules as printed by ``iptables -S``."""
        return [f"-A {self.name} {rule}" for rule in self.rules]

    def restore_input(self) -> str:
        """Return the input for ``iptables-restore --noflush``, which replaces all rules of the chain in one step."""
        lines = ["*filter", f":{self.name} - [0:0]", *self.lines, "COMMIT", ""]
        return "\n".join(lines)

    def _entry_rule(self) -> str:
        return f"-A {' '.join(self.entry)} -j {self.name}"

    def apply(self, iptables: str, before: RuleChain | None) -> None:
        """Replace the rules in the calling thread's namespace; the first time, also add the entry rule.

        ``iptables`` is the name of the command, such as ``iptables-legacy``; ``before`` is the chain that this process
        applied last, None the first time.
        """
        if before is None or before.rules != self.rules:
            # "-w" waits for the lock that other users of iptables hold; "--noflush" keeps the rules of other chains.
            command([f"{iptables}-restore", "-w", "--noflush"], self.restore_input())
        if before is not None:
            return
        # A restarted shaper finds the entry rule of its predecessor; with a second one, packets would pass twice.
        present = command([iptables, "-w", "-S", self.entry[0]]).splitlines()
        if self._entry_rule() not in present:
            command([iptables, "-w", "-I", *self.entry, "-j", self.name])

    def differences(self, observed: str) -> list[str]:
        """Compare the chain with the output of ``iptables -S``; return a text for each difference."""
        lines = observed.splitlines()
        present = [line for line in lines if line.startswith(f"-A {self.name} ")]
        problems = []
        for rule in self.lines:
            if rule not in present:
                problems.append(f"missing rule: {rule}")
        for rule in present:
            if rule not in self.lines:
                problems.append(f"unexpected rule: {rule}")
        if self._entry_rule() not in lines:
            problems.append(f"missing rule from {self.entry[0]} to {self.name}")
        return problems


def receiving_chain(plan: InterfacePlan) -> RuleChain:
    """Return the chain of the receiving side for backend `userspace`.

    Packets of a link that is down are dropped, packets of an impaired link are put into a netfilter queue, and other
    links have no rule.
    """
    rules = []
    for line in plan.receivers:
        match = f"-s {line.address}/32"
        if not line.link.up:
            rules.append(f"{match} -j DROP")
        elif line.queued:
            rules.append(f"{match} -j NFQUEUE --queue-num {line.number}")
    return RuleChain("TESTBED", ("INPUT", "-i", plan.interface), tuple(rules))
