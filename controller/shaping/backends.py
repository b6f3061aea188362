"""The two backends of the receiver's side, and which of them this kernel can serve."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, get_args

from controller.shaping import interfaces, netem, receiver, sender
from controller.shaping.delayline import DelayLine, Impairment
from controller.shaping.namespaces import Namespace, command, read_proc
from controller.shaping.nfqueue import open_socket
from controller.shaping.plan import Access, Plan, ReceiverLine, SenderClass
from testbed.errors import HostError, InputError
from testbed.network.link import Distribution, Link
from testbed.seeds import derive


class Backend(Protocol):
    """The receiver's side of the links, by one of the kernel's means. Runs in the device's namespace."""

    name: str
    priority: str
    """How the kernel schedules what makes packets wait."""

    def problem(self, plan: Plan) -> str | None:
        """Say what of a plan this backend cannot do in the device's namespace, and what would help."""

    def build(self, device: str, plan: Plan) -> None:
        """Set up everything."""

    def change(self, device: str, old: Plan, new: Plan) -> None:
        """Alter only what differs."""

    def differences(self, plan: Plan) -> list[str]:
        """Read back, and say where the kernel holds something else than the plan."""

    def forget(self, device: str) -> None:
        """The device is gone."""

    def close(self) -> None:
        """Let go of everything."""

    def statistics(self) -> dict[str, Any]:
        """Return what bears on trust in this backend."""

    def reset(self) -> None:
        """Start such figures anew."""


class Userspace:
    """NFQUEUE at the receiver's input, and a delay line in a process of its own."""

    name = "userspace"

    def __init__(self, iptables: str, seed: Callable[[], int]) -> None:
        self._iptables = iptables
        self._seed = seed
        self._line = DelayLine()
        self.priority = self._line.priority

    def problem(self, plan: Plan) -> str | None:
        """Duplicates arrive on the loopback, where a strict filter of reverse paths would drop them."""
        duplicates = any(line.link.up and line.link.duplicate for line in plan.receivers)
        strict = max(_setting(f"ipv4/conf/{name}/rp_filter") for name in ("all", "lo")) == 1
        if duplicates and strict:
            return "packets cannot be duplicated where net.ipv4.conf.all.rp_filter or .lo.rp_filter is 1: set both to 0"
        return None

    def build(self, device: str, plan: Plan) -> None:
        """Set up everything."""
        self._line.open(device, open_socket(), _injector())
        self._line.set(device, self._impairments(device, plan, None), _rate_and_limit(plan.downlink))
        self._restore(plan)
        jump = receiver.jump(plan)
        shown = command([self._iptables, "-w", "-S", "INPUT"])
        if f"-A {' '.join(jump)}" not in shown.splitlines():
            command([self._iptables, "-w", "-I", *jump])

    def change(self, device: str, old: Plan, new: Plan) -> None:
        """Alter only what differs."""
        # The queue must be served before a rule leads packets into it.
        impairments = self._impairments(device, new, old)
        if impairments or old.downlink != new.downlink:
            self._line.set(device, impairments, _rate_and_limit(new.downlink))
        if receiver.chain_rules(old) != receiver.chain_rules(new):
            self._restore(new)

    def _restore(self, plan: Plan) -> None:
        command([f"{self._iptables}-restore", "-w", "--noflush"], receiver.restore(plan))

    def _impairments(self, device: str, plan: Plan, old: Plan | None) -> list[Impairment]:
        before = {line.number: line for line in old.receivers} if old else {}
        # Whether packets' sizes are needed depends on there being a downlink.
        every = old is not None and old.downlink is None and plan.downlink is not None
        return [
            Impairment(line.number, line.limit, line.link, str(derive(self._seed(), device, line.number)))
            for line in plan.receivers
            if line.queued and (every or before.get(line.number) != line)
        ]

    def differences(self, plan: Plan) -> list[str]:
        """Read back, and say where the kernel holds something else than the plan."""
        problems = receiver.chain_differences(plan, command([self._iptables, "-w", "-S"]))
        served = {row["queue"] for row in kernel_queues()}
        wanted = {line.number for line in plan.receivers if line.queued}
        return problems + [f"netfilter queue {number} is served by nobody" for number in wanted - served]

    def forget(self, device: str) -> None:
        """Forget a device that is gone."""
        self._line.close(device)

    def close(self) -> None:
        """End the delay line."""
        self._line.stop()

    def statistics(self) -> dict[str, Any]:
        """Return the delay line's figures."""
        return self._line.statistics()

    def reset(self) -> None:
        """Start the lateness figures anew."""
        self._line.reset()


def kernel_queues() -> list[dict[str, int]]:
    """Read the netfilter queues of the calling thread's namespace, with what the kernel had to drop."""
    columns = ("queue", "port", "waiting", "mode", "range", "queue_dropped", "user_dropped")
    text = read_proc("netfilter/nfnetlink_queue")
    return [dict(zip(columns, map(int, line.split()), strict=False)) for line in text.splitlines()]


def _setting(name: str) -> int:
    """Read one of ``/proc/sys/net`` of the calling thread's namespace."""
    return int(Path("/proc/sys/net", name).read_text())


def _injector() -> socket.socket:
    """Open a packet socket on the loopback of the calling thread's namespace, for sending only."""
    try:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        made.bind(("lo", 0))
    except OSError as error:
        raise HostError(f"no packet socket can be opened: {error.strerror} (needs CAP_NET_RAW)") from error
    return made


def _rate_and_limit(access: Access | None) -> tuple[float, int] | None:
    return None if access is None else (access.rate, access.limit)


class Netem:
    """The kernel's own emulator, behind an intermediate device that takes what arrives."""

    name = "netem"
    priority = "kernel"

    def __init__(self) -> None:
        self._tables = tempfile.TemporaryDirectory(prefix="testbed-tc-")
        for distribution in get_args(Distribution):
            Path(self._tables.name, f"{distribution}.dist").write_text(netem.table(distribution))

    def problem(self, plan: Plan) -> str | None:
        """Say what of a plan netem cannot do, and what would help."""
        return next(filter(None, (netem.problem(line.link, plan.downlink) for line in plan.receivers)), None)

    def build(self, device: str, plan: Plan) -> None:
        """Set up everything."""
        present = interfaces.interface_names()
        if netem.IFB in present:
            for name in present:
                if name.startswith(netem.IFB):
                    interfaces.delete(name)
            command(["tc", "qdisc", "del", "dev", plan.interface, "ingress"])
        self._add(netem.devices(plan))
        self._tc(netem.build(plan))

    def change(self, device: str, old: Plan, new: Plan) -> None:
        """Alter only what differs."""
        if netem.devices(new) > {netem.IFB}:
            self._add(netem.devices(new) - interfaces.interface_names())
        self._tc(netem.change(old, new))

    @staticmethod
    def _add(devices: set[str]) -> None:
        for name in sorted(devices):
            interfaces.add_ifb(name)

    def _tc(self, lines: list[str]) -> None:
        if lines:
            command(["tc", "-batch", "-"], "\n".join(lines) + "\n", {**os.environ, "TC_LIB_DIR": self._tables.name})

    def differences(self, plan: Plan) -> list[str]:
        """Read back, and say where the kernel holds something else than the plan."""
        return netem.differences(
            plan,
            command(["tc", "class", "show", "dev", netem.IFB]),
            json.loads(command(["tc", "-j", "qdisc", "show"])),
            json.loads(command(["tc", "-j", "filter", "show", "dev", plan.interface, "parent", "ffff:"])),
        )

    def forget(self, device: str) -> None:
        """Nothing is kept here: the tree went with the namespace."""

    def close(self) -> None:
        """Remove the tables of distributions."""
        self._tables.cleanup()

    def statistics(self) -> dict[str, Any]:
        """Return nothing: the kernel counts for itself."""
        return {}

    def reset(self) -> None:
        """Nothing is counted here."""


CHOICES = ("auto", "netem", "userspace")

MODULES = "sch_htb, cls_u32, sch_ingress, act_mirred, ifb and sch_netem, or xt_NFQUEUE and nfnetlink_queue"
"""What a kernel must have for one of the two."""

_TRIAL = Plan(
    "trial",
    None,
    None,
    (SenderClass(0x11, ("198.18.0.1",), 1_000_000, 300),),
    (ReceiverLine(1, "198.18.0.1", Link(delay=0.001, loss=0.1), 1000, queued=True),),
    1,
)


def choose(wanted: str, seed: Callable[[], int]) -> tuple[Backend, dict[str, str]]:
    """Return the backend to use, and what stands against each of those that were tried and cannot be used.

    Raises HostError when the wanted one, or with ``auto`` either, cannot be had here.
    """
    if wanted not in CHOICES:
        raise InputError(f"'{wanted}' is no backend for links: write one of {', '.join(CHOICES)}")
    problems: dict[str, str] = {}
    if wanted in ("auto", "netem"):
        try:
            _try(netem_works)
            return Netem(), problems
        except HostError as error:
            problems["netem"] = str(error)
    if wanted in ("auto", "userspace"):
        try:
            return Userspace(_try(iptables_for_queues), seed), problems
        except HostError as error:
            problems["userspace"] = str(error)
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise HostError(f"this kernel cannot shape links ({reasons}); it needs the modules {MODULES}")


def _try(work: Callable[[], str]) -> str:
    scratch = Namespace.scratch()
    try:
        return scratch.run(lambda: _with_interface(work))
    finally:
        scratch.close()


def _with_interface(work: Callable[[], str]) -> str:
    command(["ip", "link", "add", _TRIAL.interface, "type", "veth", "peer", "name", "trial-peer"])
    command(["ip", "link", "set", _TRIAL.interface, "up"])
    command(["tc", "-batch", "-"], "\n".join(sender.build(_TRIAL)) + "\n")
    return work()


def netem_works() -> str:
    """Build a small netem tree in the calling thread's namespace; raises HostError when the kernel refuses."""
    trial = Netem()
    try:
        trial.build("trial", _TRIAL)
    finally:
        trial.close()
    return "tc"


def iptables_for_queues() -> str:
    """Return the iptables program that can lead packets into a queue here; raises HostError when none can."""
    open_socket().close()
    problems = []
    for program in ("iptables-nft", "iptables-legacy", "iptables"):
        try:
            command([f"{program}-restore", "-w", "--noflush"], receiver.restore(_TRIAL))
        except HostError as error:
            problems.append(str(error))
        else:
            return program
    raise HostError("; ".join(problems))
