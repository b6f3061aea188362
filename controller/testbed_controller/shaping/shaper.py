"""The shaper of a run on one host: it attaches devices, changes and reports their links, and measures them.

To attach a device means to shape its interface, inside its network namespace, from then on.

`Registry` knows the devices, `Planner` computes the configuration of each interface, `Applier` applies and verifies it,
and `Prober` opens the sockets of link measurements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from itertools import chain
from typing import Any

from testbed.common.errors import HostError, InputError
from testbed.network.checks import problems
from testbed.network.link import Cell, Link, Pair, links_to_json
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.shaping.applier import Applier
from testbed_controller.shaping.hostload import HostMonitor
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.planner import Planner
from testbed_controller.shaping.prober import Prober
from testbed_controller.shaping.probes import measure, measure_half
from testbed_controller.shaping.registry import Registry

_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
"""Time-out of a connection within a device's namespace, in seconds."""


def check_links(links: Mapping[Pair, Link]) -> None:
    """Raise InputError for links without a supporting backend."""
    for (source, destination), link in links.items():
        texts = [problem.text for problem in problems(link)]
        if texts:
            raise InputError(f"link {source} -> {destination}: {'; '.join(texts)}")


class Shaping:
    """The devices of a run on this host, and the links between these devices. Thread-safe.

    Example::

        shaping = Shaping("auto")
        shaping.attach(endpoints, {("a", "b"): Link(rate=1e6), ("b", "a"): Link()})
        shaping.set({("a", "b"): Link(rate=2e6)})
    """

    def __init__(self, links: str = "auto", seed: int = 0) -> None:
        """Select a backend by name; ``auto`` selects the first one with kernel support.

        Raises HostError without a supported backend.
        """
        self.seed = seed
        """Seed of random losses."""
        # A function, since the server sets the seed after the backend was opened.
        self._applier = Applier(links, lambda: self.seed)
        self.registry = Registry(self._applier.forget)
        self._prober = Prober(self.registry)
        self._lock = threading.RLock()
        self._links: dict[Pair, Link] = {}
        self._cells: tuple[Cell, ...] = ()
        self._monitor = HostMonitor()
        # Each change waits for processes of tc and iptables; more threads would only compete for the processors.
        self._pool = ThreadPoolExecutor(
            max_workers=max(2, os.cpu_count() or 2), thread_name_prefix="shape"
        )

    def facts(self) -> dict[str, Any]:
        """Return backend, kernel and the host's clocks, in seconds."""
        return {
            **self._applier.facts(),
            "kernel": os.uname().release,
            "hostname": socket.gethostname(),
            "monotonic": time.monotonic(),
            "time": time.time(),
        }

    def host_load(self, *, reset: bool = False) -> dict[str, Any]:
        """Return the processor load of the machine since the last call with ``reset``."""
        if reset:
            self._monitor.stop()
            self._monitor = HostMonitor()
            self._monitor.start()
        return self._monitor.summary()

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        cells: Iterable[Cell] | None = None,
    ) -> None:
        """Shape the interfaces of these devices, and adapt those of devices that were attached before.

        A device that is attached again in the same namespace is only changed; a restarted one is configured from
        scratch. ``links`` replace the properties of these links, and ``cells`` all cells.

        Raises InputError for links that no backend supports, and HostError for links that this backend does not
        support or that the kernel refuses.
        """
        endpoints = list(endpoints)
        check_links(links)
        with self._lock:
            if cells is not None:
                self._cells = tuple(cells)
            names = [endpoint.name for endpoint in endpoints]
            _LOG.info("attaching %s", ", ".join(names))
            self.registry.add(endpoints, self._pool)
            # Devices of this host may have links to devices that are attached later.
            if not any(endpoint.pid for endpoint in endpoints):
                self._require_attached(links)
            self._apply_changes(self.registry.devices, links)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links only; raises `InputError` for an unattached device."""
        check_links(links)
        with self._lock:
            self._require_attached(links)
            self._apply_changes(set(chain.from_iterable(links)), links)

    def _require_attached(self, links: Mapping[Pair, Link]) -> None:
        """Raise InputError if an end of a link was never attached."""
        numbers = self.registry.numbers
        for name in sorted(set(chain.from_iterable(links)) - numbers.keys()):
            raise InputError(
                f"device '{name}' is not attached; attached: {', '.join(sorted(numbers))}"
            )

    def _apply_changes(
        self, names: Collection[str], links: Mapping[Pair, Link]
    ) -> None:
        """Apply links to the interfaces of the running devices among ``names``."""
        self.registry.release_ended()
        planner = self._make_planner({**self._links, **links})
        changes = []
        # All plans are checked before the first change, so that an unsupported link changes nothing.
        for name, device in sorted(self.registry.devices.items()):
            if name not in names:
                continue
            plan = planner.plan(name, device.interface)
            problem = self._applier.problem(device, plan)
            if problem:
                raise HostError(f"links to {name}: {problem}")
            routes = planner.routes(name, device.interface)
            changes.append((device, plan, routes))
        self._log_changes(links)
        self._links |= links
        futures = []
        for change in changes:
            futures.append(self._pool.submit(self._applier.apply, *change))
        # Finish all changes before raising an error: a half-changed lab is worse than a late message.
        wait(futures)
        for future in futures:
            future.result()

    def _make_planner(self, links: Mapping[Pair, Link]) -> Planner:
        """Return a planner for these links; start the gate for the first route that needs it."""
        planner = Planner(
            self.registry.endpoints, self.registry.numbers, links, self._cells
        )
        for name, device in self.registry.devices.items():
            if planner.routes(name, device.interface):
                planner.has_gate = self._applier.ensure_gate(required=bool(self._cells))
                break
        return planner

    def _log_changes(self, links: Mapping[Pair, Link]) -> None:
        """Log each changed link; for a new lab only their number, which may be thousands."""
        if not self._links:
            _LOG.info("shaping %d links", len(links))
            return
        for pair, link in links.items():
            old = asdict(self._links.get(pair, Link()))
            changed = []
            for key, value in asdict(link).items():
                if value != old[key]:
                    changed.append(f"{key} {value}")
            if changed:
                _LOG.info("link %s -> %s: %s", *pair, ", ".join(changed))

    def wait_for_end(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the end of a device, and release the device."""
        if self.registry.await_end(seconds):
            self.release_ended()

    def release_ended(self) -> None:
        """Release every ended device, whose open namespace would otherwise still respond."""
        with self._lock:
            self.registry.release_ended()

    def connect(self, name: str, port: int) -> socket.socket:
        """Return a connection to a port on a device's loopback; raises OSError or `HostError`."""
        device = self.registry.devices.get(name)
        if device is None:
            running = ", ".join(sorted(self.registry.devices)) or "none"
            raise HostError(f"'{name}' is not running; running devices: {running}")
        # A handle of our own: if the device ends meanwhile, the registry closes its handle.
        namespace = device.namespace.duplicate()
        try:
            return namespace.run(
                lambda: socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS)
            )
        finally:
            namespace.close()

    def show(self) -> dict[str, Any]:
        """Return the requested links, and for each device the differences between the plan and the kernel's state."""
        with self._lock:
            self.registry.release_ended()
            planner = self._make_planner(self._links)
            devices = {}
            for name, device in sorted(self.registry.devices.items()):
                plan = planner.plan(name, device.interface)
                devices[name] = {
                    "address": device.endpoint.address,
                    "interface": device.interface.name,
                    "differences": self._applier.differences(device, plan),
                }
            links = links_to_json(dict(sorted(self._links.items())))
            return {
                "backend": self._applier.facts()["backend"],
                "devices": devices,
                "links": links,
            }

    def statistics(self, *, reset: bool = False) -> dict[str, Any]:
        """Return queue drops, lateness and sent bytes; ``reset`` clears the lateness."""
        with self._lock:
            self.registry.release_ended()
            return self._applier.statistics(self.registry.devices, reset=reset)

    def close(self) -> None:
        """Release all resources; the interfaces of devices stay shaped."""
        with self._lock:
            self.registry.close()
            self._applier.close()
            self._pool.shutdown()

    def probe(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links; raises InputError for an unknown link or a stopped device."""
        names = set(chain.from_iterable(pairs))
        with self._lock:
            self.registry.release_ended()
            for pair in pairs:
                if pair not in self._links:
                    raise InputError(f"no link from {pair[0]} to {pair[1]}")
            for name in names - self.registry.devices.keys():
                raise InputError(
                    f"'{name}' is not running: start the device to measure its links"
                )
            links = {pair: self._links[pair] for pair in pairs}
            routes = self._routes_of(pairs)
            with contextlib.ExitStack() as stack:
                devices = self._prober.local_devices(names, stack)
                # The namespaces stay open for the measurement; only an error before this line closes them here.
                namespaces = stack.pop_all()
        # Without the lock: a measurement takes seconds, and devices may end or links change meanwhile.
        _LOG.info("measuring %d links", len(links))
        with namespaces:
            return measure(links, devices, routes) if links else []

    def open_ends(self, measurement_id: str, pairs: Sequence[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the receiver's port of each local device."""
        with self._lock:
            return self._prober.open_ends(measurement_id, pairs)

    def probe_half(
        self,
        measurement_id: str,
        pairs: Sequence[Pair],
        ports: Mapping[str, int],
        begin: float,
    ) -> list[dict[str, Any]]:
        """Measure the local ends of links to other hosts, whose shapers do the same; see `probes.measure_half`.

        ``measurement_id`` is hexadecimal. ``ports`` has the ports of all devices; each shaper's `open_ends` returns
        those of its devices.
        """
        with self._lock:
            links = {pair: self._links[pair] for pair in pairs}
            devices, ends, sockets = self._prober.take_ends(
                measurement_id, set(chain.from_iterable(pairs)), ports
            )
            routes = self._routes_of(pairs)
        with sockets:
            return measure_half(
                links, devices, ends, bytes.fromhex(measurement_id), begin, routes
            )

    def _routes_of(self, pairs: Sequence[Pair]) -> dict[Pair, Route]:
        """Return the routes of these links through the gate; links from other hosts and without a gate are omitted."""
        interfaces = {}
        for name, device in self.registry.devices.items():
            interfaces[name] = device.interface
        return self._make_planner(self._links).routes_of_links(pairs, interfaces)
