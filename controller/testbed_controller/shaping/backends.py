"""The two backends of the receiver's side, and which of them this kernel can serve."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from testbed.common.errors import HostError, InputError
from testbed.common.seeds import derive
from testbed.network.link import Distribution, Link
from testbed_controller.shaping import interfaces, netem, nfqueue, sender, tc
from testbed_controller.shaping.chain import receiving
from testbed_controller.shaping.helper import DelayLine, QueueImpairment
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.nfqueue import kernel_queues, open_socket
from testbed_controller.shaping.plan import InterfacePlan, ReceiverLine, SenderClass
from testbed_controller.shaping.tc import Shown

MODULES_HELP = (
    "load them as root on the host with modprobe; where that finds none, install the distribution's full kernel "
    "(Debian linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r), Fedora kernel-modules-extra) and boot it; "
    "or run with --runtime simulate, which needs no kernel's help"
)
_IPTABLES = ("iptables-nft", "iptables-legacy", "iptables")
_QUEUE = "-A INPUT -s 198.18.0.1/32 -j NFQUEUE --queue-num 1"
CHOICES = ("auto", "netem", "userspace")
MODULES = "sch_htb, cls_u32, sch_ingress, act_mirred, ifb and sch_netem, or xt_NFQUEUE and nfnetlink_queue"
"""What a kernel must have for one of the two."""
_TRIAL = InterfacePlan(
    "trial",
    None,
    None,
    (SenderClass(0x11, "198.18.0.1", 1_000_000, 300),),
    (ReceiverLine(1, "198.18.0.1", Link(delay=0.001, loss=0.1), 1000, queued=True),),
    1,
)


class Backend(Protocol):
    """The receiver's side of the links, by one of the kernel's means. Runs in the device's namespace."""

    name: str
    priority: str
    """How the kernel schedules what makes packets wait."""
    tables: str | None = None
    """Folder of the distributions that ``tc`` is to know."""

    def problem(self, plan: InterfacePlan) -> str | None:
        """Say what of a plan this backend cannot do in the device's namespace, and what would help."""

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Do what is not done by ``tc``, and before that: all of it without an old plan, else what differs."""

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return what ``tc`` is to do."""
        return []

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the interfaces whose classes, and the (interface, parent) whose filters are to be read back."""
        return [], []

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Say where the kernel holds something else than the plan."""

    def close(self) -> None:
        """Let go of everything."""

    def forget(self, device: str) -> None:
        """Forget a device that is gone."""
        return

    def statistics(self) -> dict[str, Any]:
        """Return what bears on trust in this backend, beside what the kernel itself counts."""
        return {}

    def reset(self) -> None:
        """Reset such figures."""
        return


class Userspace(Backend):
    """NFQUEUE at the receiver's input, and a delay line in a process of its own."""

    name = "userspace"

    def __init__(self, iptables: str, seed: Callable[[], int]) -> None:
        self._iptables = iptables
        self._seed = seed
        self._line = DelayLine()
        self.priority = self._line.priority

    def problem(self, plan: InterfacePlan) -> str | None:
        """Duplicates arrive on the loopback, where a strict filter of reverse paths would drop them."""
        duplicates = any(line.link.up and line.link.duplicate for line in plan.receivers)
        strict = max(_setting(f"ipv4/conf/{name}/rp_filter") for name in ("all", "lo")) == 1
        if duplicates and strict:
            return "packets cannot be duplicated where net.ipv4.conf.all.rp_filter or .lo.rp_filter is 1: set both to 0"
        return None

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Set up everything, or alter what differs."""
        if old is None:
            self._line.open(device, open_socket(), _injector())
        # A queue must be served before a rule leads packets into it.
        impairments = self._impairments(device, new, old)
        if impairments or old is None or old.downlink != new.downlink:
            self._line.set(device, impairments, new.downlink)
        receiving(new).apply(self._iptables, None if old is None else receiving(old))

    def _impairments(self, device: str, plan: InterfacePlan, old: InterfacePlan | None) -> list[QueueImpairment]:
        before = {line.number: line for line in old.receivers} if old else {}
        # Whether packets' sizes are needed depends on there being a downlink.
        every = old is not None and old.downlink is None and plan.downlink is not None
        return [
            QueueImpairment(line.number, line.limit, line.link, str(derive(self._seed(), device, line.number)))
            for line in plan.receivers
            if line.queued and (every or before.get(line.number) != line)
        ]

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Read back, and say where the kernel holds something else than the plan."""
        problems = receiving(plan).differences(command([self._iptables, "-w", "-S"]))
        served = {row["queue"] for row in kernel_queues()}
        wanted = {line.number for line in plan.receivers if line.queued}
        return problems + [f"netfilter queue {number} is served by nobody" for number in wanted - served]

    def forget(self, device: str) -> None:
        """Forget a device that is gone."""
        self._line.forget(device)

    def close(self) -> None:
        """End the delay line."""
        self._line.stop()

    def statistics(self) -> dict[str, Any]:
        """Return the delay line's figures."""
        return self._line.statistics()

    def reset(self) -> None:
        """Reset the lateness figures."""
        self._line.reset()


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


class Netem(Backend):
    """The kernel's own emulator, behind an intermediate device that takes what arrives."""

    name = "netem"
    priority = "kernel"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="testbed-tc-")
        self.tables = self._folder.name
        for distribution in get_args(Distribution):
            Path(self._folder.name, f"{distribution}.dist").write_text(netem.table(distribution))

    def problem(self, plan: InterfacePlan) -> str | None:
        """Say what of a plan netem cannot do, and what would help."""
        return next(filter(None, (netem.problem(line.link, plan.downlink) for line in plan.receivers)), None)

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Make the intermediate devices."""
        if old is None:
            present = interfaces.interface_names()
            if netem.IFB in present:
                for name in present:
                    if name.startswith(netem.IFB):
                        interfaces.delete(name)
                command(["tc", "qdisc", "del", "dev", new.interface, "ingress"])
        wanted = netem.devices(new)
        if old is None or wanted > {netem.IFB}:
            for name in sorted(wanted - interfaces.interface_names()):
                interfaces.add_ifb(name)

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return what ``tc`` is to do."""
        return netem.build(new) if old is None else netem.change(old, new)

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return what is to be read back: the classes of the shared device, the filters of what arrives."""
        return [netem.IFB], [(plan.interface, "ffff:")]

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Say where the kernel holds something else than the plan."""
        return netem.differences(plan, shown.classes, shown.qdiscs, shown.filters[1])

    def close(self) -> None:
        """Remove the tables of distributions."""
        self._folder.cleanup()


def _tc(words: str) -> Callable[[], object]:
    return lambda: command(["tc", *words.split()])


_SENDER: dict[str, Callable[[], object]] = {
    "sch_htb": _tc("qdisc add dev lo root handle 1: htb"),
    "cls_u32": _tc("filter add dev lo parent 1: protocol ip u32 match ip dst 198.18.0.1/32 flowid 1:1"),
}
_NETEM: dict[str, Callable[[], object]] = {
    **_SENDER,
    "ifb": lambda: interfaces.add_ifb("trial-ifb"),
    "sch_netem": _tc("qdisc add dev trial-ifb root netem delay 1ms"),
    "sch_ingress": _tc("qdisc add dev lo ingress"),
    "act_mirred": _tc(
        "filter add dev lo parent ffff: protocol ip u32 match ip src 198.18.0.1/32 action mirred egress redirect dev lo"
    ),
}


def _iptables_for_a_queue() -> str:
    """Return the program with which the kernel takes a rule of a queue; raises HostError when none does.

    The rule is left in the calling thread's namespace.
    """
    problems = []
    for program in _IPTABLES:
        try:
            command([f"{program}-restore", "-w", "--noflush"], f"*filter\n{_QUEUE}\nCOMMIT\n")
        except HostError as error:
            problems.append(str(error))
        else:
            return program
    raise HostError("; ".join(problems))


_USERSPACE: dict[str, Callable[[], object]] = {
    **_SENDER,
    "nfnetlink_queue": nfqueue.check,
    "xt_NFQUEUE": _iptables_for_a_queue,
}


def missing_modules() -> dict[str, list[str]]:
    """Return, by backend, the modules that this kernel does not offer; it is asked in scratch namespaces."""
    return {"netem": _lacking(_NETEM), "userspace": _lacking(_USERSPACE)}


def _lacking(pieces: dict[str, Callable[[], object]]) -> list[str]:
    with closing(Namespace.scratch()) as scratch:
        return [name for name, ask in pieces.items() if not scratch.run(partial(_answers, ask))]


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except HostError:
        return False
    return True


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
    reasons = "; ".join(f"{name} {reason}" for name, reason in _reasons(problems).items())
    raise HostError(f"this kernel ({os.uname().release}) cannot shape links: {reasons}; {MODULES_HELP}")


def _reasons(problems: Mapping[str, str]) -> dict[str, str]:
    """Say why backends with these problems cannot be had: for want of which modules, if that is why."""
    lacking = missing_modules() if problems else {}
    return {
        name: f"lacks {', '.join(lacking[name])}" if lacking[name] else f"fails ({problem})"
        for name, problem in problems.items()
    }


def backend_problems() -> dict[str, str]:
    """Say of each backend, and of the gate (radio cells, casts), why this kernel cannot serve it, or nothing."""
    found = dict.fromkeys(("netem", "userspace", "gate"), "")
    problems = {}
    for name, trial in (("netem", netem_works), ("userspace", iptables_for_queues)):
        try:
            _try(trial)
        except HostError as error:
            problems[name] = str(error)
    found |= _reasons(problems)
    try:
        queueing_iptables()
    except HostError:
        found["gate"] = found["userspace"]  # it needs the same queues
    return found


def queueing_iptables() -> str:
    """Return the iptables program that leads packets into queues on this kernel; raises HostError when none can."""
    return _try(iptables_for_queues)


def _try(work: Callable[[], str]) -> str:
    with closing(Namespace.scratch()) as scratch:
        return scratch.run(partial(_with_interface, work))


def _with_interface(work: Callable[[], str]) -> str:
    command(["ip", "link", "add", _TRIAL.interface, "type", "veth", "peer", "name", "trial-peer"])
    command(["ip", "link", "set", _TRIAL.interface, "up"])
    tc.run(sender.build(_TRIAL), [], [])
    return work()


def netem_works() -> str:
    """Build a small netem tree in the calling thread's namespace; raises HostError when the kernel refuses."""
    with closing(Netem()) as trial:
        trial.apply("trial", None, _TRIAL)
        tc.run(trial.lines(None, _TRIAL), [], [], trial.tables)
    return "tc"


def iptables_for_queues() -> str:
    """Return the iptables program that can lead packets into a queue here; raises HostError when none can."""
    nfqueue.check()
    return _iptables_for_a_queue()
