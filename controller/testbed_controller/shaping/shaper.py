"""Which devices are attached and which links applied: plans carried out in the devices' namespaces, and read back."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from testbed.common.errors import HostError, InputError
from testbed.network.checks import problems
from testbed.network.link import Cell, Link, Pair, links_to_json
from testbed.trace.outcome import LinkMeasurement
from testbed.wire.framing import CONGESTION_CONTROL
from testbed_controller.shaping import plan as planning
from testbed_controller.shaping import sender, tc
from testbed_controller.shaping.backends import choose, queueing_iptables
from testbed_controller.shaping.helper import Gate
from testbed_controller.shaping.hostload import HostMonitor
from testbed_controller.shaping.interfaces import (
    Interface,
    bound_segments,
    delete,
    forbid_offloads,
    interface_of,
    make_bridge,
    plug,
    route_by_default,
    segments_of,
    set_address,
    set_congestion_control,
    set_neighbours,
)
from testbed_controller.shaping.medium import Route, routes
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.nfqueue import kernel_queues
from testbed_controller.shaping.plan import Endpoint, InterfacePlan, linked_addresses
from testbed_controller.shaping.probes import measure, measure_half
from testbed_controller.shaping.trains import Ends, FarEnds, Site, sockets

_LOG = logging.getLogger(__name__)

INTERFACE = "eth0"
"""What a device's interface on the data network is called, the only one it has."""
_BRIDGE = "data"
_CONNECT_SECONDS = 5.0


def refuse(links: Mapping[Pair, Link]) -> None:
    """Raise InputError for links that no backend can have."""
    for (source, destination), link in links.items():
        if found := problems(link):
            raise InputError(f"link {source} -> {destination}: {'; '.join(each.text for each in found)}")


@dataclass
class Attached:
    """A device whose interface is shaped."""

    endpoint: Endpoint
    namespace: Namespace
    interface: Interface
    process: int
    """Descriptor of the process that the namespace is of; it can be read once that has ended."""
    port: str = ""
    """On the bridge, where the shaper has plugged it in."""
    plan: InterfacePlan | None = None
    """What was last applied and read back; None before that, or when the last attempt failed half route."""
    routes: dict[str, Route] | None = None
    """What waits for its turn at the gate, by address; None before the gate was needed here."""
    neighbours: set[str] = field(default_factory=set)
    """Addresses whose hardware address the interface was given."""

    def close(self) -> None:
        """Let go of it."""
        self.namespace.close()
        os.close(self.process)


def _hardware(address: str) -> str:
    """Return the hardware address of the device that has an IPv4 address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *IPv4Address(address).packed))


def _ended(processes: Iterable[int], seconds: float) -> bool:
    """Wait up to some seconds until one of the processes with these descriptors has ended; say whether one has."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


class Shaping:
    """All devices of a run on this host and the links between them. Safe to use from several threads."""

    def __init__(self, links: str = "auto", seed: int = 0) -> None:
        """Choose the backend of this name, or with ``auto`` the first that the kernel supports.

        Raises HostError when there is none.
        """
        self.seed = seed
        """Seed of the choices which packets are lost."""
        self._backend, self._refused = choose(links, lambda: self.seed)
        _LOG.info(
            "links are shaped by %s%s", self._backend.name, f"; refused: {self._refused}" if self._refused else ""
        )
        self._lock = threading.RLock()
        self._devices: dict[str, Attached] = {}
        self._numbers: dict[str, int] = {}
        self._elsewhere: dict[str, Endpoint] = {}
        """Devices on other hosts, whose interfaces are shaped there."""
        self._ends: dict[str, tuple[dict[str, Ends], contextlib.ExitStack]] = {}
        """Sockets for measurements with other hosts that have not begun."""
        self._links: dict[Pair, Link] = {}
        self._cells: tuple[Cell, ...] = ()
        self._gate: Gate | None = None
        self._ungated = ""
        """Why there can be no gate."""
        self._bridge: Namespace | None = None
        """Where the bridge is that devices are plugged into, and nothing else: nobody has an address there."""
        self._ports = itertools.count()
        self._monitor = HostMonitor()
        self._pool = ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2), thread_name_prefix="shape")

    def facts(self) -> dict[str, Any]:
        """Return kernel, backend and this host's clocks."""
        return {
            "backend": self._backend.name,
            "congestion_control": CONGESTION_CONTROL,
            "refused": self._refused,
            "priority": self._backend.priority,
            "gate": self._gate.priority if self._gate else self._ungated or "not needed",
            "kernel": os.uname().release,
            "hostname": socket.gethostname(),
            "monotonic": time.monotonic(),
            "time": time.time(),
        }

    def host_load(self, reset: bool = False) -> dict[str, Any]:
        """Return how busy this machine's processors were since the last ``reset``."""
        if reset:
            self._monitor.stop()
            self._monitor = HostMonitor()
            self._monitor.start()
        return self._monitor.summary()

    def attach(
        self, endpoints: Iterable[Endpoint], links: Mapping[Pair, Link], cells: Iterable[Cell] | None = None
    ) -> None:
        """Shape the interfaces of these devices, and adapt those of the others to them.

        A device that is attached already in the same namespace is only changed; one that restarted is built again.
        ``cells`` replace those there are. Raises `InputError` for links of devices that are not attached.
        """
        with self._lock:
            refuse(links)
            if cells is not None:
                self._cells = tuple(cells)
            given = list(endpoints)
            _LOG.info("attaching %s", ", ".join(each.name for each in given))
            fresh = [each for each in given if each.pid]
            self.release_the_dead()  # before others have their addresses
            if self._bridge is None and any(each.network for each in fresh):
                self._bridge = Namespace.scratch()
                self._bridge.run(partial(make_bridge, _BRIDGE))
            self._elsewhere |= {each.name: each for each in given if not each.pid}
            for name in self._elsewhere:
                self._numbers.setdefault(name, len(self._numbers) + 1)
            for found in self._pool.map(self._find, fresh):
                name = found.endpoint.name
                self._numbers.setdefault(name, len(self._numbers) + 1)
                previous = self._devices.get(name)
                if previous and previous.namespace.identity == found.namespace.identity:
                    found.plan, found.routes, found.port = previous.plan, previous.routes, previous.port
                    found.neighbours = previous.neighbours
                    previous.close()
                elif previous:
                    self._forget(name)
                self._devices[name] = found
            unknown = {name for pair in links for name in pair} - self._numbers.keys()
            if unknown and not fresh:
                raise InputError(f"no such device is attached: {', '.join(sorted(unknown))}")
            self._change(self._devices, links)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links and nothing else; raises `InputError` for a device that is not attached."""
        with self._lock:
            for pair in links:
                for name in pair:
                    if name not in self._numbers:
                        raise InputError(
                            f"no device '{name}' is attached; there are {', '.join(sorted(self._numbers))}"
                        )
            refuse(links)
            self._change({name for pair in links for name in pair}, links)

    def _find(self, endpoint: Endpoint) -> Attached:
        with contextlib.ExitStack() as stack:
            namespace = Namespace.of_process(endpoint.pid)
            stack.callback(namespace.close)
            port, interface = "", namespace.run(partial(interface_of, endpoint.address))
            if interface is None:
                if endpoint.network is None:
                    text = f"no interface of {endpoint.name} has the address {endpoint.address}"
                    raise HostError(f"{text}: is it attached to the data network?")
                port = f"p{next(self._ports)}"
                interface = self._plug(port, namespace, endpoint.address, IPv4Network(endpoint.network))
            process = os.pidfd_open(endpoint.pid)
            stack.pop_all()
        return Attached(endpoint, namespace, interface, process, port)

    def _plug(self, port: str, namespace: Namespace, address: str, network: IPv4Network) -> Interface:
        """Give a device its interface, of the same hardware address each time: others have been given that."""
        assert self._bridge is not None
        hardware = _hardware(address)
        self._bridge.run(lambda: plug(port, _BRIDGE, INTERFACE, hardware, namespace.descriptor))
        namespace.run(partial(set_address, INTERFACE, address, network))
        return Interface(INTERFACE, str(network.broadcast_address))

    def _change(self, names: Iterable[str], links: Mapping[Pair, Link]) -> None:
        """Bring the interfaces of these devices in line with the links; devices that are gone are let go."""
        alive = [self._devices[name] for name in sorted(names) if name in self._devices and self._exists(name)]
        before, self._links = self._links, {**self._links, **links}
        self._log_changes(before, links)
        self._have_gate()
        for attached in alive:
            wanted = self._plan(attached)
            if problem := attached.namespace.run(partial(self._backend.problem, wanted)):
                self._links = before
                raise HostError(f"links to {attached.endpoint.name}: {problem}")
        # Each to its end before an error is raised: a half-changed lab is worse than a late message.
        outcomes = [self._pool.submit(self._apply_one, attached) for attached in alive]
        errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
        for error in errors:
            raise error

    def _log_changes(self, before: Mapping[Pair, Link], links: Mapping[Pair, Link]) -> None:
        """Log each link that is not as it was before; those of a new lab only together, as they may be thousands."""
        if not before:
            _LOG.info("shaping %d links", len(links))
            return
        for pair, link in links.items():
            old, new = asdict(before.get(pair, Link())), asdict(link)
            changed = ", ".join(f"{key} {new[key]}" for key in new if new[key] != old[key])
            if changed:
                _LOG.info("link %s -> %s: %s", *pair, changed)

    def _exists(self, name: str) -> bool:
        """Say whether a device still runs; let go of it if not, so that its namespace can end."""
        if not _ended([self._devices[name].process], 0.0):
            return True
        self._forget(name)
        return False

    def _forget(self, name: str) -> None:
        _LOG.info("%s has ended: its links are released", name)
        attached = self._devices.pop(name)
        if attached.port and self._bridge is not None:
            with contextlib.suppress(HostError):  # its other end is gone, and it with that
                self._bridge.run(partial(delete, attached.port))
        self._backend.forget(name)
        if self._gate is not None:
            self._gate.forget(name)
        attached.close()

    def await_death(self, seconds: float) -> None:
        """Return as soon as a device ends, or after so long."""
        if not _ended([each.process for each in list(self._devices.values())], seconds):
            return
        self.release_the_dead()

    def connect(self, name: str, port: int) -> socket.socket:
        """Return a connection to a port of a device's loopback; raises OSError or `HostError` where nobody answers."""
        attached = self._devices.get(name)
        if attached is None:
            raise HostError(f"'{name}' does not run")
        namespace = attached.namespace.again()
        try:
            return namespace.run(lambda: socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS))
        finally:
            namespace.close()

    def release_the_dead(self) -> None:
        """Let go of every device that does not run any more: what is held here would keep its namespace answering."""
        with self._lock:
            for name in list(self._devices):
                self._exists(name)

    def _have_gate(self) -> None:
        """Start the gate when something has to wait there; where it cannot be, casts go as HTB lets them, cells not."""
        if self._gate is not None or not any(self._routes(attached) for attached in self._devices.values()):
            return
        try:
            self._gate = Gate(queueing_iptables())
        except HostError as error:
            if self._cells:
                raise HostError(
                    f"a radio cell needs netfilter queues, which this kernel does not offer: {error}"
                ) from error
            self._ungated = str(error)

    def _routes(self, attached: Attached) -> dict[str, Route]:
        """Return what a device has to send over a shared medium."""
        if self._ungated:
            return {}
        endpoints = self._endpoints()
        addresses = {name: each.address for name, each in endpoints.items()}
        downlinks = {name: each.downlink for name, each in endpoints.items()}
        endpoint, broadcast = attached.endpoint, attached.interface.broadcast
        return routes(endpoint.name, broadcast, addresses, self._links, self._cells, endpoint.uplink, downlinks)

    def _endpoints(self) -> dict[str, Endpoint]:
        """Return every device, wherever it is."""
        return {**self._elsewhere, **{name: each.endpoint for name, each in self._devices.items()}}

    def _plan(self, attached: Attached) -> InterfacePlan:
        return planning.plan(
            attached.endpoint,
            attached.interface.name,
            attached.interface.broadcast,
            {name: (self._numbers[name], each.address) for name, each in self._endpoints().items()},
            self._links,
            {address: route.rate for address, route in self._routes(attached).items()},
        )

    def _apply_one(self, attached: Attached) -> None:
        wanted, routes = self._plan(attached), self._routes(attached)
        if attached.plan == wanted and (attached.routes or {}) == routes:
            return
        name, old = attached.endpoint.name, attached.plan
        attached.plan = None

        def work() -> list[str]:
            if self._gate is not None and (routes or attached.routes):
                before, attached.routes = attached.routes, None
                self._gate.apply(name, wanted.interface, before, routes)
                attached.routes = routes
            if old is None:
                forbid_offloads(wanted.interface)
                route_by_default(wanted.interface)
                set_congestion_control(wanted.interface, CONGESTION_CONTROL)
            if attached.endpoint.network is not None:
                unknown = linked_addresses(wanted) - attached.neighbours
                set_neighbours(wanted.interface, {address: _hardware(address) for address in unknown})
                attached.neighbours |= unknown
            if old is None or old.segments != wanted.segments:
                bound_segments(wanted.interface, wanted.segments)
            self._backend.apply(name, old, wanted)
            lines = sender.build(wanted) if old is None else sender.change(old, wanted)
            return self._differences(attached, wanted, [*lines, *self._backend.lines(old, wanted)])

        if problems := attached.namespace.run(work):
            raise HostError(f"links of {name} did not take: {'; '.join(problems)}")
        attached.plan = wanted

    def _differences(self, attached: Attached, plan: InterfacePlan, lines: Sequence[str] = ()) -> list[str]:
        """Carry out lines of ``tc``, and say where the kernel then holds something else than the plan."""
        classes, filters = self._backend.reads(plan)
        shown = tc.run(lines, [plan.interface, *classes], [(plan.interface, "1:"), *filters], self._backend.tables)
        segments = segments_of(plan.interface)
        return [
            *([] if segments == plan.segments else [f"TCP may send {segments} packets at once, not {plan.segments}"]),
            *sender.differences(plan, shown.classes, shown.qdiscs, shown.filters[0]),
            *self._backend.differences(plan, shown),
            *(self._gate.differences(plan.interface, attached.routes) if self._gate and attached.routes else []),
        ]

    def show(self) -> dict[str, Any]:
        """Return the links that were asked for, and per device where the kernel differs, read back now."""
        with self._lock:
            self.release_the_dead()
            devices = {}
            for name, attached in sorted(self._devices.items()):
                wanted = self._plan(attached)
                differences = attached.namespace.run(partial(self._differences, attached, wanted))
                devices[name] = {
                    "address": attached.endpoint.address,
                    "interface": attached.interface.name,
                    "differences": differences,
                }
            links = links_to_json(dict(sorted(self._links.items())))
            return {"backend": self._backend.name, "devices": devices, "links": links}

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return what bears on trust, drops at queues and how late packets were let go, and what bytes devices sent.

        ``reset`` resets the lateness.
        """
        with self._lock:
            self.release_the_dead()
            queues = {
                name: attached.namespace.run(partial(self._queue_counts, attached))
                for name, attached in sorted(self._devices.items())
            }
            sent = {name: counts.pop("bytes") for name, counts in queues.items()}
            figures = {
                "backend": self._backend.name,
                "congestion_control": CONGESTION_CONTROL,
                **self._backend.statistics(),
                "queues": queues,
                "sent": sent,
            }
            own = os.times()
            figures["processor_seconds"] = figures.get("processor_seconds", 0.0) + own.user + own.system
            if self._gate is not None:
                gate = figures["gate"] = self._gate.statistics()
                lateness = figures.get("lateness", {})
                figures["lateness"] = {
                    key: max(value, lateness.get(key, 0.0)) for key, value in gate["lateness"].items()
                }
                figures["processor_seconds"] += gate["processor_seconds"]
                for name, dropped in gate["dropped"].items():
                    if name in queues:
                        queues[name]["sender_drops"] += dropped
            if reset:
                self._backend.reset()
                if self._gate is not None:
                    self._gate.reset()
            return figures

    def _queue_counts(self, attached: Attached) -> dict[str, int]:
        """Count, in the device's namespace, the packets that found a queue full, and the bytes that have left it."""
        shown = json.loads(command(["tc", "-s", "-j", "qdisc", "show", "dev", attached.interface.name]))
        counts = {"sender_drops": sum(entry.get("drops", 0) for entry in shown if entry.get("kind") == "pfifo")}
        counts["bytes"] = sum(entry.get("bytes", 0) for entry in shown if entry.get("root"))
        if self._backend.uses_queues or attached.routes:
            rows = kernel_queues()
            counts["queue_dropped"] = sum(row["queue_dropped"] for row in rows)
            counts["user_dropped"] = sum(row["user_dropped"] for row in rows)
        return counts

    def close(self) -> None:
        """Let go of everything; what was applied to the devices stays."""
        with self._lock:
            for attached in self._devices.values():
                attached.close()
            self._devices.clear()
            if self._bridge is not None:
                self._bridge.close()
            self._backend.close()
            if self._gate is not None:
                self._gate.stop()
            self._pool.shutdown()

    def probe(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure these links; raises InputError for one that is not there or whose device does not run."""
        with self._lock:
            self.release_the_dead()
            for pair in pairs:
                if pair not in self._links:
                    raise InputError(f"there is no link from {pair[0]} to {pair[1]}")
                for name in pair:
                    if name not in self._devices:
                        raise InputError(f"'{name}' does not run: its links cannot be measured")
            links = {pair: self._links[pair] for pair in pairs}
            media = self._media(pairs)
            with contextlib.ExitStack() as stack:
                sites = {name: self._site(name, stack) for name in {name for pair in pairs for name in pair}}
                held = stack.pop_all()
        _LOG.info("measuring %d links", len(links))
        with held:
            return measure(links, sites, media) if links else []

    def open_ends(self, run: str, pairs: Sequence[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the port of the receiver of each device that is here."""
        with self._lock, contextlib.ExitStack() as stack:
            here = {name for pair in pairs for name in pair if name in self._devices}
            sites = {name: self._site(name, stack) for name in here}
            ends = stack.enter_context(sockets(sites, here))
            self._ends[run] = ends, stack.pop_all()
            return {name: each.target[1] for name, each in ends.items()}

    def probe_half(
        self, run: str, pairs: Sequence[Pair], ports: Mapping[str, int], begin: float
    ) -> list[dict[str, Any]]:
        """Measure links between this host and others, which do the same; see `probes.measure_half`.

        ``ports`` are those of all devices, of which the ones here are those of `open_ends`.
        """
        with self._lock:
            ends, held = self._ends.pop(run)
            links = {pair: self._links[pair] for pair in pairs}
            sites, both = {}, dict[str, Ends | FarEnds](ends)
            for name in {name for pair in pairs for name in pair}:
                endpoint = self._elsewhere.get(name) or self._devices[name].endpoint
                sites[name] = Site(None, endpoint.address, endpoint.uplink, endpoint.downlink)
                both.setdefault(name, FarEnds((endpoint.address, ports[name])))
            media = self._media(pairs)
        with held:
            return measure_half(links, sites, both, bytes.fromhex(run), begin, media)

    def _site(self, name: str, stack: contextlib.ExitStack) -> Site:
        """Return where a device is, as long as the stack holds it."""
        attached = self._devices[name]
        namespace = attached.namespace.again()
        stack.callback(namespace.close)
        endpoint = attached.endpoint
        return Site(namespace, endpoint.address, endpoint.uplink, endpoint.downlink)

    def _media(self, pairs: Sequence[Pair]) -> dict[Pair, Route]:
        """Return the channels that these links have at the gate, as far as their senders are on this host."""
        here = {source for source, _ in pairs if source in self._devices}
        routes = {name: self._routes(self._devices[name]) for name in here}
        address = {name: each.address for name, each in self._endpoints().items()}
        return {(a, b): routes[a][address[b]] for a, b in pairs if a in here and address[b] in routes[a]}
