"""The built-in link backends, and the selection of a backend with kernel support."""

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
from testbed_controller.shaping.tc import Shown

MODULES_HELP = (
    "load them as root on the host with modprobe; where that finds none, install the distribution's full kernel "
    "(Debian linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r), Fedora kernel-modules-extra) and boot it; "
    "or run with --runtime simulate, which needs no kernel modules"
)
_IPTABLES = ("iptables-nft", "iptables-legacy", "iptables")
_QUEUE = "-A INPUT -s 198.18.0.1/32 -j NFQUEUE --queue-num 1"
MODULES = "sch_htb, cls_u32, sch_ingress, act_mirred, ifb and sch_netem, or xt_NFQUEUE and nfnetlink_queue"
"""Kernel modules required by one of the two backends."""
_TRIAL = InterfacePlan(
    "trial",
    None,
    None,
    (SenderClass(0x11, "198.18.0.1", 1_000_000, 300),),
    (ReceiverLine(1, "198.18.0.1", Link(delay=0.001, loss=0.1), 1000, queued=True),),
    1,
)


def _tc_trial(words: str) -> Callable[[], object]:
    return lambda: command(["tc", *words.split()])


_SENDER: dict[str, Callable[[], object]] = {
    "sch_htb": _tc_trial("qdisc add dev lo root handle 1: htb"),
    "cls_u32": _tc_trial(
        "filter add dev lo parent 1: protocol ip u32 match ip dst 198.18.0.1/32 flowid 1:1"
    ),
}
_NETEM: dict[str, Callable[[], object]] = {
    **_SENDER,
    "ifb": lambda: interfaces.add_ifb("trial-ifb"),
    "sch_netem": _tc_trial("qdisc add dev trial-ifb root netem delay 1ms"),
    "sch_ingress": _tc_trial("qdisc add dev lo ingress"),
    "act_mirred": _tc_trial(
        "filter add dev lo parent ffff: protocol ip u32 match ip src 198.18.0.1/32 action mirred egress redirect dev lo"
    ),
}


def _iptables_for_a_queue() -> str:
    """Return an iptables program whose queue rules the kernel accepts; raises HostError without one.

    The rule stays in the namespace of the calling thread.
    """
    problems = []
    for program in _IPTABLES:
        try:
            command(
                [f"{program}-restore", "-w", "--noflush"],
                f"*filter\n{_QUEUE}\nCOMMIT\n",
            )
        except HostError as error:
            problems.append(str(error))
        else:
            return program
    raise HostError("; ".join(problems))


_USERSPACE: dict[str, Callable[[], object]] = {
    **_SENDER,
    "nfnetlink_queue": nfqueue.check_support,
    "xt_NFQUEUE": _iptables_for_a_queue,
}


class Userspace(Backend):
    """The backend with NFQUEUE at the receiver's input and a delay line in a separate process."""

    name = "userspace"
    automatic = True
    requirements = _USERSPACE
    uses_queues = True

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> str:
        """Return an iptables program with support for packet queues; raises HostError without one."""
        nfqueue.check_support()
        return _iptables_for_a_queue()

    @classmethod
    def open(cls, kernel: str, seed: Callable[[], int]) -> Self:
        """Return a backend for the given iptables program."""
        return cls(kernel, seed)

    def __init__(self, iptables: str, seed: Callable[[], int]) -> None:
        self._iptables = iptables
        self._seed = seed
        self._line = DelayLine()
        self.priority = self._line.priority

    def problem(self, plan: InterfacePlan) -> str | None:
        """Return an error for duplicates with a strict reverse-path filter, which drops packets on loopback."""
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
        """Create queues and rules, or change the differing ones."""
        if old is None:
            self._line.open(device, open_socket(), _open_injector())
        # The queue must have a reader before a rule leads packets into it.
        impairments = self._impairments(device, new, old)
        if impairments or old is None or old.downlink != new.downlink:
            self._line.set(device, impairments, new.downlink)
        receiving_chain(new).apply(
            self._iptables, None if old is None else receiving_chain(old)
        )

    def _impairments(
        self, device: str, plan: InterfacePlan, old: InterfacePlan | None
    ) -> list[QueueImpairment]:
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

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Return the differences between the plan and the rules and queues of the kernel."""
        problems = receiving_chain(plan).differences(
            command([self._iptables, "-w", "-S"])
        )
        served = {row["queue"] for row in kernel_queues()}
        wanted = {line.number for line in plan.receivers if line.queued}
        # The kernel drops all packets of a queue without a reader.
        for number in wanted - served:
            problems.append(f"netfilter queue {number} has no reader")
        return problems

    def forget(self, device: str) -> None:
        """Release an ended device."""
        self._line.forget(device)

    def close(self) -> None:
        """Stop the delay line."""
        self._line.stop()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the delay line."""
        return self._line.statistics()

    def reset(self) -> None:
        """Reset the lateness statistics."""
        self._line.reset()


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
    """The backend with the kernel's emulator netem, behind an intermediate device for arriving packets."""

    name = "netem"
    automatic = True
    requirements = _NETEM

    @classmethod
    def link_problem(cls, link: Link, downlink: Access | None) -> str | None:
        """Return a property of a link which netem cannot emulate, with a remedy; None for a supported link."""
        return netem.unsupported_property(link, downlink)

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> None:
        """Build a small netem tree in the calling thread's namespace; raises HostError if the kernel refuses."""
        with closing(cls()) as backend:
            backend.apply("trial", None, trial)
            tc.run_batch(backend.lines(None, trial), [], [], backend.tables)

    def __init__(self) -> None:
        # Both backends draw delays from the same tables (docs/fidelity.md), so iproute2's own are not used.
        self._folder = tempfile.TemporaryDirectory(prefix="testbed-tc-")
        self.tables = self._folder.name
        for distribution in get_args(Distribution):
            table = netem.distribution_table(distribution)
            Path(self._folder.name, f"{distribution}.dist").write_text(table)

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Create the intermediate devices."""
        if old is None:
            # A shaper that was restarted finds the devices of its predecessor.
            present = interfaces.interface_names()
            if netem.IFB in present:
                for name in present:
                    if name.startswith(netem.IFB):
                        interfaces.delete_interface(name)
                command(["tc", "qdisc", "del", "dev", new.interface, "ingress"])
        wanted = netem.ifbs_of(new)
        # Listing the interfaces takes a request to the kernel, which most changes of a link can do without.
        if old is None or wanted > {netem.IFB}:
            for name in sorted(wanted - interfaces.interface_names()):
                interfaces.add_ifb(name)

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return the commands for ``tc -batch``."""
        return netem.build(new) if old is None else netem.change(old, new)

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the shared intermediate device and the ingress filters for read-back."""
        return [netem.IFB], [(plan.interface, "ffff:")]

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Return the differences between the plan and the kernel's state."""
        return netem.differences(plan, shown.classes, shown.qdiscs, shown.filters[1])

    def close(self) -> None:
        """Remove the distribution tables."""
        self._folder.cleanup()


def missing_modules() -> dict[str, list[str]]:
    """Return the kernel modules missing for each backend, tested in scratch namespaces."""
    return {
        name: _find_missing(LINK_BACKENDS.find(name).requirements)
        for name in LINK_BACKENDS.own
    }


def _find_missing(requirements: Mapping[str, Callable[[], object]]) -> list[str]:
    missing = []
    # All in one namespace: later trials build on what earlier ones have created.
    with closing(Namespace.scratch()) as scratch:
        for name, trial in requirements.items():
            if not scratch.run(partial(_succeeds, trial)):
                missing.append(name)
    return missing


def _succeeds(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except HostError:
        return False
    return True


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
            return backend.open(_run_in_scratch(backend.check_kernel), seed), problems
        except HostError as error:
            problems[name] = str(error)
    explained = _explain_failures(problems)
    reasons = "; ".join(f"{name} {reason}" for name, reason in explained.items())
    raise HostError(
        f"this kernel ({os.uname().release}) cannot shape links: {reasons}; {MODULES_HELP}"
    )


def _explain_failures(problems: Mapping[str, str]) -> dict[str, str]:
    """Return the missing kernel modules of each failed backend, or the problem if no module is missing."""
    reasons = {}
    for name, problem in problems.items():
        lacking = _find_missing(LINK_BACKENDS.find(name).requirements)
        if lacking:
            reasons[name] = f"lacks {', '.join(lacking)}"
        else:
            reasons[name] = f"fails ({problem})"
    return reasons


def backend_problems() -> dict[str, str]:
    """Return the problem of each backend and of the gate (radio cells, broadcasts); empty if supported."""
    problems = {}
    for name in LINK_BACKENDS.own:
        try:
            _run_in_scratch(LINK_BACKENDS.find(name).check_kernel)
        except HostError as error:
            problems[name] = str(error)
    reasons = dict.fromkeys(LINK_BACKENDS.own, "")
    reasons |= _explain_failures(problems)
    reasons["gate"] = ""
    try:
        queueing_iptables()
    except HostError:
        reasons["gate"] = reasons[Userspace.name]  # the gate needs the same queues
    return reasons


def queueing_iptables() -> str:
    """Return an iptables program with support for packet queues; raises HostError without kernel support."""
    return str(_run_in_scratch(Userspace.check_kernel))


def _run_in_scratch(check_kernel: Callable[[InterfacePlan], Any]) -> Any:
    with closing(Namespace.scratch()) as scratch:
        return scratch.run(partial(_with_interface, check_kernel))


def _with_interface(check_kernel: Callable[[InterfacePlan], Any]) -> Any:
    pair = f"{_TRIAL.interface} type veth peer name trial-peer"
    command(["ip", "link", "add", *pair.split()])
    command(["ip", "link", "set", _TRIAL.interface, "up"])
    tc.run_batch(sender.build(_TRIAL), [], [])
    return check_kernel(_TRIAL)
