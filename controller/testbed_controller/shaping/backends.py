"""The testbed's two link backends, and the choice of a backend that this kernel supports."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

from testbed.common.errors import HostError
from testbed.common.seeds import derive
from testbed.network.link import Distribution, Link
from testbed_controller.shaping import interfaces, netem, nfqueue, sender, tc
from testbed_controller.shaping.backend import AUTO, LINK_BACKENDS, Backend, check_name
from testbed_controller.shaping.chain import receiving
from testbed_controller.shaping.helper import DelayLine, QueueImpairment
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.nfqueue import kernel_queues, open_socket
from testbed_controller.shaping.plan import Access, InterfacePlan, ReceiverLine, SenderClass
from testbed_controller.shaping.tc import Shown

MODULES_HELP = (
    "load them as root on the host with modprobe; where that finds none, install the distribution's full kernel "
    "(Debian linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r), Fedora kernel-modules-extra) and boot it; "
    "or run with --runtime simulate, which needs no kernel's help"
)
_IPTABLES = ("iptables-nft", "iptables-legacy", "iptables")
_QUEUE = "-A INPUT -s 198.18.0.1/32 -j NFQUEUE --queue-num 1"
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


class Userspace(Backend):
    """NFQUEUE at the receiver's input, and a delay line in a process of its own."""

    name = "userspace"
    automatic = True
    requirements = _USERSPACE
    uses_queues = True

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> str:
        """Return the iptables program that can lead packets into a queue here; raises HostError when none can."""
        nfqueue.check()
        return _iptables_for_a_queue()

    @classmethod
    def open(cls, kernel: str, seed: Callable[[], int]) -> Self:
        """Return the backend that uses this iptables program."""
        return cls(kernel, seed)

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
    automatic = True
    requirements = _NETEM

    @classmethod
    def link_problem(cls, link: Link, downlink: Access | None) -> str | None:
        """Return the property of a link that netem cannot provide, and a remedy."""
        return netem.problem(link, downlink)

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> None:
        """Build a small netem tree in the calling thread's namespace; raises HostError when the kernel refuses."""
        with closing(cls()) as backend:
            backend.apply("trial", None, trial)
            tc.run(backend.lines(None, trial), [], [], backend.tables)

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="testbed-tc-")
        self.tables = self._folder.name
        for distribution in get_args(Distribution):
            Path(self._folder.name, f"{distribution}.dist").write_text(netem.table(distribution))

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


def missing_modules() -> dict[str, list[str]]:
    """Return, by backend, the modules that this kernel does not offer; it is asked in scratch namespaces."""
    return {name: _lacking(LINK_BACKENDS.find(name).requirements) for name in LINK_BACKENDS.own}


def _lacking(requirements: Mapping[str, Callable[[], object]]) -> list[str]:
    with closing(Namespace.scratch()) as scratch:
        return [name for name, trial in requirements.items() if not scratch.run(partial(_answers, trial))]


def _answers(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except HostError:
        return False
    return True


def choose(wanted: str, seed: Callable[[], int]) -> tuple[Backend, dict[str, str]]:
    """Return the backend to use, and the problems of those that were tried and cannot be used.

    Raises `HostError` when the kernel supports neither the wanted one nor, with ``auto``, any.
    """
    names = list(LINK_BACKENDS.own) if check_name(wanted) == AUTO else [wanted]
    problems: dict[str, str] = {}
    for name in names:
        backend = LINK_BACKENDS.find(name)
        if wanted == AUTO and not backend.automatic:
            continue
        try:
            return backend.open(_try(backend.check_kernel), seed), problems
        except HostError as error:
            problems[name] = str(error)
    reasons = "; ".join(f"{name} {reason}" for name, reason in _reasons(problems).items())
    raise HostError(f"this kernel ({os.uname().release}) cannot shape links: {reasons}; {MODULES_HELP}")


def _reasons(problems: Mapping[str, str]) -> dict[str, str]:
    """Return, by backend, the missing kernel modules, or the problem where all modules are there."""
    reasons = {}
    for name, problem in problems.items():
        lacking = _lacking(LINK_BACKENDS.find(name).requirements)
        reasons[name] = f"lacks {', '.join(lacking)}" if lacking else f"fails ({problem})"
    return reasons


def backend_problems() -> dict[str, str]:
    """Return why this kernel does not support each backend, and the gate (radio cells, casts); empty where it does."""
    problems = {}
    for name in LINK_BACKENDS.own:
        try:
            _try(LINK_BACKENDS.find(name).check_kernel)
        except HostError as error:
            problems[name] = str(error)
    found = dict.fromkeys(LINK_BACKENDS.own, "") | _reasons(problems) | {"gate": ""}
    try:
        queueing_iptables()
    except HostError:
        found["gate"] = found[Userspace.name]  # it needs the same queues
    return found


def queueing_iptables() -> str:
    """Return the iptables program that leads packets into queues on this kernel; raises HostError when none can."""
    return str(_try(Userspace.check_kernel))


def _try(check_kernel: Callable[[InterfacePlan], Any]) -> Any:
    with closing(Namespace.scratch()) as scratch:
        return scratch.run(partial(_with_interface, check_kernel))


def _with_interface(check_kernel: Callable[[InterfacePlan], Any]) -> Any:
    command(["ip", "link", "add", _TRIAL.interface, "type", "veth", "peer", "name", "trial-peer"])
    command(["ip", "link", "set", _TRIAL.interface, "up"])
    tc.run(sender.build(_TRIAL), [], [])
    return check_kernel(_TRIAL)
