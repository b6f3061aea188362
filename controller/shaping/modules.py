"""Which of the kernel's modules a backend lacks, found by asking the kernel for each thing by itself."""

from __future__ import annotations

from collections.abc import Callable

from controller.shaping import interfaces, nfqueue
from controller.shaping.namespaces import Namespace, command
from testbed.common.errors import HostError

HELP = (
    "load them as root on the host with modprobe; where that finds none, install the distribution's full kernel "
    "(Debian linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r), Fedora kernel-modules-extra) and boot it; "
    "or run with --runtime simulate, which needs no kernel's help"
)
_IPTABLES = ("iptables-nft", "iptables-legacy", "iptables")
_QUEUE = "-A INPUT -s 198.18.0.1/32 -j NFQUEUE --queue-num 1"


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


def iptables(rule: str = _QUEUE) -> str:
    """Return the program with which the kernel takes a rule, by default of a queue; raises HostError when none does.

    The rule is left in the calling thread's namespace.
    """
    problems = []
    for program in _IPTABLES:
        try:
            command([f"{program}-restore", "-w", "--noflush"], f"*filter\n{rule}\nCOMMIT\n")
        except HostError as error:
            problems.append(str(error))
        else:
            return program
    raise HostError("; ".join(problems))


_USERSPACE: dict[str, Callable[[], object]] = {
    **_SENDER,
    "nfnetlink_queue": nfqueue.check,
    "xt_NFQUEUE": iptables,
}


def missing() -> dict[str, list[str]]:
    """Return, by backend, the modules that this kernel does not offer; it is asked in scratch namespaces."""
    return {"netem": _lacking(_NETEM), "userspace": _lacking(_USERSPACE)}


def _lacking(pieces: dict[str, Callable[[], object]]) -> list[str]:
    scratch = Namespace.scratch()
    try:
        found = [name for name, ask in pieces.items() if not scratch.run(lambda ask=ask: _answers(ask))]  # type: ignore[misc]
    finally:
        scratch.close()
    return found


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except HostError:
        return False
    return True
