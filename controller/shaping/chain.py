"""A chain of rules of our own in the filter table of iptables, and the rule that leads into it."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from controller.shaping.namespaces import command
from controller.shaping.plan import InterfacePlan
from testbed.wire.ports import CONTROL_PORT


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


def remove_ipv6() -> None:
    """Take the IPv6 addresses from the calling thread's namespace, of which a wall says nothing.

    Docker leaves none; Podman leaves those that the kernel gives to every interface.
    """
    known = Path("/proc/thread-self/net/if_inet6")
    lines = known.read_text().splitlines() if known.exists() else []
    for interface in sorted({line.split()[-1] for line in lines} - {"lo"}):
        command(["ip", "link", "set", "dev", interface, "addrgenmode", "none"])
        command(["ip", "-6", "address", "flush", "dev", interface])


def wall(interface: str, network: IPv4Network) -> tuple[RuleChain, RuleChain]:
    """Return the chains that keep a device from the host, from other runs and from the world.

    They stand in the device's own namespace, which a program in it may not change, and vanish with it. The host is the
    first of the data network's addresses. Over every other interface the agent answers on its control port, and nothing
    begins there.
    """
    host, answers = f"{network.network_address + 1}/32", "! --tcp-flags FIN,SYN,RST,ACK SYN"
    out = (
        "-o lo -j RETURN",
        f"! -o {interface} -p tcp -m tcp --sport {CONTROL_PORT} {answers} -j RETURN",
        f"! -o {interface} -j DROP",
        f"-d {host} -j DROP",
        f"-d {network} -j RETURN",
        "-d 224.0.0.0/4 -j RETURN",
        "-d 255.255.255.255/32 -j RETURN",
        "-j DROP",
    )
    into = (
        "-i lo -j RETURN",
        f"! -i {interface} -p tcp -m tcp --dport {CONTROL_PORT} -j RETURN",
        f"! -i {interface} -j DROP",
        f"-p tcp -m tcp --dport {CONTROL_PORT} -j DROP",
        f"-s {host} -j DROP",
        f"-s {network} -j RETURN",
        "-j DROP",
    )
    return RuleChain("TESTBED-OUT", ("OUTPUT",), out), RuleChain("TESTBED-IN", ("INPUT",), into)
