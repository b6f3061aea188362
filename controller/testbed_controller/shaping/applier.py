"""Application of plans to devices' interfaces by ``tc`` and a link backend, with read-back and statistics.

After each change, the state of the kernel is read and compared with the plan.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from testbed.common.errors import HostError
from testbed.wire.framing import CONGESTION_CONTROL
from testbed_controller.shaping import sender, tc
from testbed_controller.shaping.backends import choose_backend, queueing_iptables
from testbed_controller.shaping.datagrams import count_unread_datagrams
from testbed_controller.shaping.helper import Gate
from testbed_controller.shaping.interfaces import (
    forbid_offloads,
    limit_segments,
    route_by_default,
    segments_of,
    set_congestion_control,
    set_neighbours,
)
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.nfqueue import kernel_queues
from testbed_controller.shaping.plan import InterfacePlan, linked_addresses
from testbed_controller.shaping.registry import AttachedDevice, hardware_address

_LOG = logging.getLogger(__name__)


class Applier:
    """The link backend of this host and, if needed, the gate: they bring interfaces into their planned state."""

    def __init__(self, links: str, seed: Callable[[], int]) -> None:
        self._backend, self._refused = choose_backend(links, seed)
        refused = f"; refused: {self._refused}" if self._refused else ""
        _LOG.info("links are shaped by %s%s", self._backend.name, refused)
        self._gate: Gate | None = None
        self._gate_problem = ""
        """Reason why the gate could not be started; empty otherwise."""

    def facts(self) -> dict[str, Any]:
        """Return the backend, and the scheduling priorities of backend and gate."""
        gate = self._gate_problem or "not needed"
        if self._gate is not None:
            gate = self._gate.priority
        return {
            "backend": self._backend.name,
            "congestion_control": CONGESTION_CONTROL,
            "refused": self._refused,
            "priority": self._backend.priority,
            "gate": gate,
        }

    def ensure_gate(self, *, required: bool) -> bool:
        """Start the gate on first use; return whether a gate is available.

        Without a gate, HTB paces broadcasts and slow links; only a radio cell requires a gate. Raises HostError if the
        gate is ``required`` and the kernel lacks netfilter queues.
        """
        if self._gate is None and not self._gate_problem:
            try:
                self._gate = Gate(queueing_iptables())
            except HostError as error:
                self._gate_problem = str(error)
        if self._gate is None and required:
            raise HostError(
                f"a radio cell needs netfilter queues, which this kernel lacks: {self._gate_problem}"
            )
        return self._gate is not None

    def problem(self, device: AttachedDevice, plan: InterfacePlan) -> str:
        """Return the reason why the backend cannot apply a plan, or an empty text."""
        return device.namespace.run(partial(self._backend.problem, plan)) or ""

    def apply(
        self, device: AttachedDevice, plan: InterfacePlan, routes: dict[str, Route]
    ) -> None:
        """Apply a plan to a device's interface and verify the kernel's state; raises HostError for differences."""
        if device.plan == plan and (device.routes or {}) == routes:
            return
        name = device.endpoint.name
        old = device.plan
        # A failure leaves an unknown state, and then the next plan must be applied from scratch.
        device.plan = None
        problems = device.namespace.run(
            lambda: self._apply_inside(device, old, plan, routes)
        )
        if problems:
            raise HostError(
                f"links of {name} could not be applied: {'; '.join(problems)}"
            )
        device.plan = plan

    def _apply_inside(
        self,
        device: AttachedDevice,
        old: InterfacePlan | None,
        plan: InterfacePlan,
        routes: dict[str, Route],
    ) -> list[str]:
        """Apply a plan in the device's namespace; return the remaining differences."""
        name = device.endpoint.name
        interface = plan.interface
        if self._gate is not None and (routes or device.routes):
            routes_before = device.routes
            # After a failure, the gate must be set up from scratch, too.
            device.routes = None
            self._gate.apply(name, interface, routes_before, routes)
            device.routes = routes
        if old is None:
            forbid_offloads(interface)
            route_by_default(interface)
            # Set after the default route exists, since each route of the interface names the algorithm.
            set_congestion_control(interface, CONGESTION_CONTROL)
        if device.endpoint.network is not None:
            new_neighbours = linked_addresses(plan) - device.neighbours
            hardware = {}
            for address in new_neighbours:
                hardware[address] = hardware_address(address)
            set_neighbours(interface, hardware)
            device.neighbours |= new_neighbours
        if old is None or old.segments != plan.segments:
            limit_segments(interface, plan.segments)
        # The backend first creates the devices and queues to which its tc commands direct packets.
        self._backend.apply(name, old, plan)
        lines = sender.build(plan) if old is None else sender.change(old, plan)
        lines += self._backend.lines(old, plan)
        return self._differences(device, plan, lines)

    def differences(self, device: AttachedDevice, plan: InterfacePlan) -> list[str]:
        """Return the differences between a device's plan and the state of the kernel."""
        return device.namespace.run(partial(self._differences, device, plan))

    def _differences(
        self, device: AttachedDevice, plan: InterfacePlan, lines: Sequence[str] = ()
    ) -> list[str]:
        """Execute ``tc`` commands, then return the differences between the plan and the kernel's state."""
        classes, filters = self._backend.reads(plan)
        # A single process changes and reads the state, since starting tc takes longer than most batches.
        state = tc.run_batch(
            lines,
            [plan.interface, *classes],
            [(plan.interface, "1:"), *filters],
            self._backend.tables,
        )
        problems = []
        segments = segments_of(plan.interface)
        if segments != plan.segments:
            problems.append(
                f"TCP may send {segments} packets at once instead of {plan.segments}"
            )
        problems += sender.differences(
            plan, state.classes, state.qdiscs, state.filters[0]
        )
        problems += self._backend.differences(plan, state)
        if self._gate and device.routes:
            problems += self._gate.differences(plan.interface, device.routes)
        return problems

    def statistics(
        self, devices: Mapping[str, AttachedDevice], *, reset: bool
    ) -> dict[str, Any]:
        """Return queue drops, lateness and sent bytes; ``reset`` clears the lateness."""
        queues = {}
        sent = {}
        for name, device in sorted(devices.items()):
            counts = device.namespace.run(partial(self._queue_counts, device))
            sent[name] = counts.pop("bytes")
            queues[name] = counts
        statistics = {
            "backend": self._backend.name,
            "congestion_control": CONGESTION_CONTROL,
            **self._backend.statistics(),
            "queues": queues,
            "sent": sent,
        }
        # The helper processes have reported their processor time; this process adds that of requests and measurements.
        usage = os.times()
        seconds = statistics.get("processor_seconds", 0.0)
        statistics["processor_seconds"] = seconds + usage.user + usage.system
        if self._gate is not None:
            _add_gate(statistics, self._gate.statistics())
        if reset:
            self._backend.reset()
            if self._gate is not None:
                self._gate.reset()
        return statistics

    def _queue_counts(self, device: AttachedDevice) -> dict[str, int]:
        """Count the packets dropped by full queues and sockets, and the bytes sent, in the device's namespace."""
        counts = {"sender_drops": 0, "bytes": 0}
        interface = device.interface.name
        text = command(["tc", "-s", "-j", "qdisc", "show", "dev", interface])
        for entry in json.loads(text):
            # Packets are dropped by the leaves of the queue tree, and the root counts the bytes of all leaves.
            if entry.get("kind") == "pfifo":
                counts["sender_drops"] += entry.get("drops", 0)
            if entry.get("root"):
                counts["bytes"] += entry.get("bytes", 0)
        if self._backend.uses_queues or device.routes:
            counts["queue_dropped"] = 0
            counts["user_dropped"] = 0
            for row in kernel_queues():
                counts["queue_dropped"] += row["queue_dropped"]
                counts["user_dropped"] += row["user_dropped"]
        counts["unread"] = count_unread_datagrams()
        return counts

    def forget(self, name: str) -> None:
        """Release the resources of an ended device."""
        self._backend.forget(name)
        if self._gate is not None:
            self._gate.forget(name)

    def close(self) -> None:
        """Stop the backend and the gate; the devices keep their settings."""
        self._backend.close()
        if self._gate is not None:
            self._gate.stop()


def _add_gate(statistics: dict[str, Any], gate: Mapping[str, Any]) -> None:
    """Add the statistics of the gate to the backend's."""
    statistics["gate"] = gate
    # A packet passes the gate and then a delay line. The verdict of a run uses the larger lateness of both.
    lateness = statistics.get("lateness", {})
    maxima = {}
    for key, value in gate["lateness"].items():
        maxima[key] = max(value, lateness.get(key, 0.0))
    statistics["lateness"] = maxima
    statistics["processor_seconds"] += gate["processor_seconds"]
    for name, dropped in gate["dropped"].items():
        if name in statistics["queues"]:
            statistics["queues"][name]["sender_drops"] += dropped
