"""The gate, where packets wait at their sender for their turn on a medium: the server's end of `gatekeeper.py`.

Packets are taken at the sender's output, where they still count as unsent: a socket feels that the channel is busy, a
cast is over when its last bit is, and one transmission is charged once however many hear it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from controller.shaping import gating, nfqueue
from controller.shaping.backends import kernel_queues
from controller.shaping.helper import Helper
from controller.shaping.medium import Route
from controller.shaping.namespaces import command


class Gate(Helper):
    """The server's end of the gate. Its rules come and go by `apply`, in the device's namespace.

    Its statistics also count what passed and was lost.
    """

    def __init__(self, iptables: str) -> None:
        super().__init__("controller.shaping.gatekeeper", "gate of the medium")
        self._iptables = iptables

    def apply(self, device: str, interface: str, old: Mapping[str, Route] | None, new: Mapping[str, Route]) -> None:
        """Let what the device sends to these addresses wait for its turn, and nothing else.

        ``old`` is what was applied before in the same namespace, None at first.
        """
        if old is None:
            with nfqueue.open_socket() as netfilter:
                self.ask({"do": "open", "device": device}, [netfilter.fileno()])
        # It must be known what becomes of packets before a rule leads them here.
        self.ask({"do": "set", "device": device, "routes": {address: asdict(route) for address, route in new.items()}})
        before = None if old is None else gating.chain(interface, old)
        gating.chain(interface, new).apply(self._iptables, before)

    def differences(self, interface: str, routes: Mapping[str, Route]) -> list[str]:
        """Read back, and say where the kernel holds something else."""
        problems = gating.chain(interface, routes).differences(command([self._iptables, "-w", "-S"]))
        if routes and gating.QUEUE not in {row["queue"] for row in kernel_queues()}:
            problems.append("the queue of the medium is served by nobody")
        return problems
