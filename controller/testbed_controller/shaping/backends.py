"""The built-in link backends, and the selection of a backend with kernel support."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Self, get_args

from testbed.common.errors import HostError
from testbed.common.seeds import derive
from testbed.network.link import Distribution, Link
from testbed_controller.shaping import interfaces, netem, nfqueue, sender, tc
from testbed_controller.shaping.backend import AUTO, LINK_BACKENDS, Backend, check_name
from testbed_controller.shaping.chain import receiving_chain
from testbed_controller.shaping.helper import DelayLine, QueueImpairment
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.nfqueue import kernel_queues, open_socket
from testbed_controller.shaping.plan import (
    Access,
    InterfacePlan,
    ReceiverLine,
    SenderClass,
)
from testbed_controller.shaping.tc import KernelState

MODULES = "sch_htb, cls_u32, sch_ingress, act_mirred, ifb and sch_netem, or xt_NFQUEUE and nfnetlink_queue"
"""Kernel modules that one of the two backends needs, for messages."""
MODULES_HELP = (
    "load them as root on the host with modprobe; where that finds none, install the distribution's full kernel "
    "(Debian linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r), Fedora kernel-modules-extra) and boot it; "
    "or run with --runtime simulate, which needs no kernel modules"
)
_IPTABLES = ("iptables-nft", "iptables-legacy", "iptables")
"""Programs in the order in which they are tried; kernels may support only one of the two tables of rules."""
_TRIAL_RULE = "-A INPUT -s 198.18.0.1/32 -j NFQUEUE --queue-num 1"
_TRIAL_PLAN = InterfacePlan(
    interface="trial",
    uplink=None,
    downlink=None,
    senders=(
        SenderClass(number=0x11, address="198.18.0.1", rate=1_000_000, limit=300),
    ),
    receivers=(
        ReceiverLine(
            number=1,
            address="198.18.0.1",
            link=Link(delay=0.001, loss=0.1),
            limit=1000,
            queued=True,
        ),
    ),
    segments=1,
)
"""Example of a plan, to test the kernel with. RFC 2544 reserves the addresses 198.18.0.0/15 for measurements."""


def _tc_trial(words: str) -> Callable[[], object]:
    """Return a function that runs ``tc`` with these arguments, and raises HostError if the kernel refuses."""
    return lambda: command(["tc", *words.split()])


# Each entry tests the kernel module of its name. The tests of a backend run one after the other in one namespace, so a
# test may use the objects that earlier ones have created.
_SENDER_MODULES: dict[str, Callable[[], object]] = {
    "sch_htb": _tc_trial("qdisc add dev lo root handle 1: htb"),
    "cls_u32": _tc_trial(
        "filter add dev lo parent 1: protocol ip u32 match ip dst 198.18.0.1/32 flowid 1:1"
    ),
}
_NETEM_MODULES: dict[str, Callable[[], object]] = {
    **_SENDER_MODULES,
    "ifb": lambda: interfaces.add_ifb("trial-ifb"),
    "sch_netem": _tc_trial("qdisc add dev trial-ifb root netem delay 1ms"),
    "sch_ingress": _tc_trial("qdisc add dev lo ingress"),
    "act_mirred": _tc_trial(
        "filter add dev lo parent ffff: protocol ip u32 match ip src 198.18.0.1/32 action mirred egress redirect dev lo"
    ),
}


def _find_queueing_iptables() -> str:
    """Return an iptables program whose queue rules the kernel accepts; raises HostError without one.

    The rule stays in the namespace of the calling thread.
    """
    problems = []
    for program in _IPTABLES:
        try:
            command(
                [f"{program}-restore", "-w", "--noflush"],
                f"*filter\n{_TRIAL_RULE}\nCOMMIT\n",
            )
        except HostError as error:
            problems.append(str(error))
        else:
            return program
    raise HostError("; ".join(problems))


_USERSPACE_MODULES: dict[str, Callable[[], object]] = {
    **_SENDER_MODULES,
    "nfnetlink_queue": nfqueue.check_support,
    "xt_NFQUEUE": _find_queueing_iptables,
}


class Userspace(Backend):
    """The backend in which a process of the shaper, the delay line, holds the packets that arrive at devices.

    iptables rules put these packets into netfilter queues (NFQUEUE), which the delay line reads.
    """

    name = "userspace"
    automatic = True
    requirements = _USERSPACE_MODULES
    uses_queues = True

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> str:
        """Return an iptables program with support for packet queues; raises HostError without one."""
        nfqueue.check_support()
        return _find_queueing_iptables()

    @classmethod
    def open(cls, kernel: str, seed: Callable[[], int]) -> Self:
        """Return a backend; ``kernel`` is the iptables program from `check_kernel`."""
        return cls(kernel, seed)

    def __init__(self, iptables: str, seed: Callable[[], int]) -> None:
        self._iptables = iptables
        self._seed = seed
        self._delay_line = DelayLine()
        self.priority = self._delay_line.priority

    def problem(self, plan: InterfacePlan) -> str | None:
        """Return the problem of a plan with duplicates if a strict reverse-path filter would drop them on loopback."""
        lines = plan.receivers
        if not any(line.link.up and line.link.duplicate for line in lines):
            return None
        # The kernel applies the larger of the two settings; 1 is strict, 2 loose.
        settings = [
            _read_setting(f"ipv4/conf/{name}/rp_filter") for name in ("all", "lo")
        ]
        if max(settings) == 1:
            return "duplicates need net.ipv4.conf.all.rp_filter and .lo.rp_filter other than 1: set both to 0"
        return None

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Create queues and rules; with an old plan, apply only the differences."""
        if old is None:
            self._delay_line.open(device, open_socket(), _open_injector())
        # The kernel drops packets of a queue without a reader, so the queues come before the rules.
        impairments = self._changed_impairments(device, new, old)
        if impairments or old is None or old.downlink != new.downlink:
            self._delay_line.set(device, impairments, new.downlink)
        old_chain = None if old is None else receiving_chain(old)
        receiving_chain(new).apply(self._iptables, old_chain)

    def _changed_impairments(
        self, device: str, plan: InterfacePlan, old: InterfacePlan | None
    ) -> list[QueueImpairment]:
        """Return the impairments of each new or changed queue."""
        before = {line.number: line for line in old.receivers} if old else {}
        # A new downlink needs the sizes of packets, which requires all queues to be configured again.
        has_new_downlink = (
            old is not None and old.downlink is None and plan.downlink is not None
        )
        changed = []
        for line in plan.receivers:
            if not line.queued:
                continue
            if has_new_downlink or before.get(line.number) != line:
                seed = str(derive(self._seed(), device, line.number))
                changed.append(
                    QueueImpairment(line.number, line.limit, line.link, seed)
                )
        return changed

    def differences(self, plan: InterfacePlan, observed: KernelState) -> list[str]:
        """Return the differences between the plan and the rules and queues of the kernel."""
        rules = command([self._iptables, "-w", "-S"])
        problems = receiving_chain(plan).differences(rules)
        # The kernel lists only queues with a reader.
        read_queues = {row["queue"] for row in kernel_queues()}
        planned_queues = {line.number for line in plan.receivers if line.queued}
        for number in planned_queues - read_queues:
            problems.append(f"netfilter queue {number} has no reader")
        return problems

    def forget(self, device: str) -> None:
        """Release an ended device."""
        self._delay_line.forget(device)

    def close(self) -> None:
        """Stop the delay line."""
        self._delay_line.stop()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the delay line."""
        return self._delay_line.statistics()

    def reset(self) -> None:
        """Reset the lateness statistics."""
        self._delay_line.reset()


def _read_setting(name: str) -> int:
    """Read a setting below ``/proc/sys/net`` in the calling thread's namespace."""
    return int(Path("/proc/sys/net", name).read_text())


def _open_injector() -> socket.socket:
    """Open a send-only packet socket on the loopback of the calling thread's namespace."""
    try:
        injector = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        injector.bind(("lo", 0))
    except OSError as error:
        raise HostError(
            f"cannot open a packet socket: {error.strerror} (needs CAP_NET_RAW)"
        ) from error
    return injector


class Netem(Backend):
    """The backend with the kernel's emulator netem.

    netem delays packets that leave an interface. Packets that arrive at a device are therefore redirected to an
    intermediate device (IFB), which they leave again.
    """

    name = "netem"
    automatic = True
    requirements = _NETEM_MODULES

    @classmethod
    def link_problem(cls, link: Link, downlink: Access | None) -> str | None:
        """Return a property of a link which netem cannot emulate, with a remedy; None for a supported link."""
        return netem.unsupported_property(link, downlink)

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> None:
        """Build a small netem tree in the calling thread's namespace; raises HostError if the kernel refuses."""
        with closing(cls()) as backend:
            backend.apply("trial", None, trial)
            tc.run_batch(backend.lines(None, trial), tables=backend.tables)

    def __init__(self) -> None:
        # Both backends draw delays from the same tables (docs/fidelity.md), so those of iproute2 are not used.
        self._folder = tempfile.TemporaryDirectory(prefix="testbed-tc-")
        self.tables = self._folder.name
        for distribution in get_args(Distribution):
            table = netem.distribution_table(distribution)
            Path(self._folder.name, f"{distribution}.dist").write_text(table)

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Create the intermediate devices."""
        if old is None:
            # A restarted shaper finds the intermediate devices of its predecessor.
            present = interfaces.interface_names()
            if netem.IFB in present:
                for name in present:
                    if name.startswith(netem.IFB):
                        interfaces.delete_interface(name)
                command(["tc", "qdisc", "del", "dev", new.interface, "ingress"])
        ifbs = netem.ifbs_of(new)
        # Most changes use only the IFB that exists already, and need no request to list the interfaces.
        if old is None or ifbs > {netem.IFB}:
            for name in sorted(ifbs - interfaces.interface_names()):
                interfaces.add_ifb(name)

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return the commands for the netem tree, or for the changes of an old one."""
        return netem.build(new) if old is None else netem.change(old, new)

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the shared intermediate device and the ingress filters for read-back."""
        return [netem.IFB], [(plan.interface, "ffff:")]

    def differences(self, plan: InterfacePlan, observed: KernelState) -> list[str]:
        """Return the differences between the plan and the kernel's state."""
        # The first filters are those of the sending side.
        ingress_filters = observed.filters[1]
        return netem.differences(
            plan, observed.classes, observed.qdiscs, ingress_filters
        )

    def close(self) -> None:
        """Remove the distribution tables."""
        self._folder.cleanup()


def missing_modules() -> dict[str, list[str]]:
    """Return the missing kernel modules of each backend, by the name of the backend."""
    missing = {}
    for name in LINK_BACKENDS.own:
        missing[name] = _find_missing(LINK_BACKENDS.find(name).requirements)
    return missing


def _find_missing(requirements: Mapping[str, Callable[[], object]]) -> list[str]:
    missing = []
    with closing(Namespace.scratch()) as scratch:
        for module, test in requirements.items():
            try:
                scratch.run(test)
            except HostError:
                missing.append(module)
    return missing


def choose_backend(
    wanted: str, seed: Callable[[], int]
) -> tuple[Backend, dict[str, str]]:
    """Return a usable backend, and the problems of the backends tried before.

    Raises `HostError` if the kernel does not support the wanted backend or, for ``auto``, any.
    """
    names = list(LINK_BACKENDS.own) if check_name(wanted) == AUTO else [wanted]
    problems: dict[str, str] = {}
    for name in names:
        backend = LINK_BACKENDS.find(name)
        if wanted == AUTO and not backend.automatic:
            continue
        try:
            kernel = _test_in_scratch(backend.check_kernel)
            return backend.open(kernel, seed), problems
        except HostError as error:
            problems[name] = str(error)
    reasons = []
    for name, reason in _explain_failures(problems).items():
        reasons.append(f"{name} {reason}")
    raise HostError(
        f"this kernel ({os.uname().release}) cannot shape links: {'; '.join(reasons)}; {MODULES_HELP}"
    )


def _explain_failures(problems: Mapping[str, str]) -> dict[str, str]:
    """Return a text about each failed backend: the missing kernel modules, or else the problem itself."""
    reasons = {}
    for name, problem in problems.items():
        missing = _find_missing(LINK_BACKENDS.find(name).requirements)
        if missing:
            reasons[name] = f"lacks {', '.join(missing)}"
        else:
            reasons[name] = f"fails ({problem})"
    return reasons


def backend_problems() -> dict[str, str]:
    """Return the problem of each backend and of the gate (radio cells, broadcasts); empty if supported."""
    problems = {}
    for name in LINK_BACKENDS.own:
        try:
            _test_in_scratch(LINK_BACKENDS.find(name).check_kernel)
        except HostError as error:
            problems[name] = str(error)
    reasons = dict.fromkeys(LINK_BACKENDS.own, "")
    reasons |= _explain_failures(problems)
    reasons["gate"] = ""
    try:
        queueing_iptables()
    except HostError:
        # The gate needs the same queues as this backend.
        reasons["gate"] = reasons[Userspace.name]
    return reasons


def queueing_iptables() -> str:
    """Return an iptables program with support for packet queues; raises HostError without kernel support."""
    return str(_test_in_scratch(Userspace.check_kernel))


def _test_in_scratch(check_kernel: Callable[[InterfacePlan], Any]) -> Any:
    """Apply the sending side of the trial plan in a new namespace, and return the result of ``check_kernel`` there."""

    def test() -> Any:
        interface = _TRIAL_PLAN.interface
        pair = f"{interface} type veth peer name trial-peer"
        command(["ip", "link", "add", *pair.split()])
        command(["ip", "link", "set", interface, "up"])
        tc.run_batch(sender.build(_TRIAL_PLAN))
        return check_kernel(_TRIAL_PLAN)

    with closing(Namespace.scratch()) as scratch:
        return scratch.run(test)
