"""The shaper of a run: attaches devices, changes and shows their links, and measures them.

`Registry` knows the devices, `Planner` says what each interface shall do, `Applier` does that and reads it back, and
`Prober` opens the sockets that links are measured with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def refuse(links: Mapping[Pair, Link]) -> None:
    """Raise InputError for links that no backend can have."""
    for (source, destination), link in links.items():
        if found := problems(link):
            raise InputError(f"link {source} -> {destination}: {'; '.join(each.text for each in found)}")


class Shaping:
    """All devices of a run on this host and the links between them. Safe to use from several threads."""

    def __init__(self, links: str = "auto", seed: int = 0) -> None:
        """Choose the backend of this name, or with ``auto`` the first that the kernel supports.

        Raises HostError when there is none.
        """
        self.seed = seed
        """Seed of the choices which packets are lost."""
        self._applier = Applier(links, lambda: self.seed)
        self.registry = Registry(self._applier.forget)
        self._prober = Prober(self.registry)
        self._lock = threading.RLock()
        self._links: dict[Pair, Link] = {}
        self._cells: tuple[Cell, ...] = ()
        self._monitor = HostMonitor()
        self._pool = ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2), thread_name_prefix="shape")

    def facts(self) -> dict[str, Any]:
        """Return kernel, backend and this host's clocks."""
        return {
            **self._applier.facts(),
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
        endpoints = list(endpoints)
        refuse(links)
        with self._lock:
            if cells is not None:
                self._cells = tuple(cells)
            _LOG.info("attaching %s", ", ".join(each.name for each in endpoints))
            self.registry.add(endpoints, self._pool)
            if not any(each.pid for each in endpoints):
                self._require_known(links)
            self._change(self.registry.devices, links)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links and nothing else; raises `InputError` for a device that is not attached."""
        refuse(links)
        with self._lock:
            self._require_known(links)
            self._change(set(chain.from_iterable(links)), links)

    def _require_known(self, links: Mapping[Pair, Link]) -> None:
        known = self.registry.numbers
        for name in sorted(set(chain.from_iterable(links)) - known.keys()):
            raise InputError(f"no device '{name}' is attached; there are {', '.join(sorted(known))}")

    def _change(self, names: Collection[str], links: Mapping[Pair, Link]) -> None:
        """Apply these links to the interfaces of the devices among ``names`` that still run."""
        self.registry.release_ended()
        planner = self._planner({**self._links, **links})
        changes = []
        for name, attached in sorted(self.registry.devices.items()):
            if name in names:
                plan = planner.plan(name, attached.interface)
                changes.append((attached, plan, planner.routes(name, attached.interface)))
                if problem := self._applier.problem(attached, plan):
                    raise HostError(f"links to {name}: {problem}")
        self._log_changes(links)
        self._links |= links
        # Each to its end before an error is raised: a half-changed lab is worse than a late message.
        outcomes = [self._pool.submit(self._applier.apply, *change) for change in changes]
        errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
        for error in errors:
            raise error

    def _planner(self, links: Mapping[Pair, Link]) -> Planner:
        """Return a planner of these links, with the gate if a device needs one and there can be one."""
        planner = Planner(self.registry.endpoints, self.registry.numbers, links, self._cells)
        if any(planner.routes(name, each.interface) for name, each in self.registry.devices.items()):
            planner.gated = self._applier.has_gate(required=bool(self._cells))
        return planner

    def _log_changes(self, links: Mapping[Pair, Link]) -> None:
        """Log each link that changes; those of a new lab only together, as they may be thousands."""
        if not self._links:
            _LOG.info("shaping %d links", len(links))
            return
        for pair, link in links.items():
            old, new = asdict(self._links.get(pair, Link())), asdict(link)
            changed = ", ".join(f"{key} {new[key]}" for key in new if new[key] != old[key])
            if changed:
                _LOG.info("link %s -> %s: %s", *pair, changed)

    def await_death(self, seconds: float) -> None:
        """Return as soon as a device ends, or after so long."""
        if self.registry.await_end(seconds):
            self.release_the_dead()

    def release_the_dead(self) -> None:
        """Release every device that has ended: an open namespace would continue to answer."""
        with self._lock:
            self.registry.release_ended()

    def connect(self, name: str, port: int) -> socket.socket:
        """Return a connection to a port of a device's loopback; raises OSError or `HostError` where nobody answers."""
        attached = self.registry.devices.get(name)
        if attached is None:
            raise HostError(f"'{name}' does not run")
        namespace = attached.namespace.again()
        try:
            return namespace.run(lambda: socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS))
        finally:
            namespace.close()

    def show(self) -> dict[str, Any]:
        """Return the links that were asked for, and per device where the kernel differs, read back now."""
        with self._lock:
            self.registry.release_ended()
            planner = self._planner(self._links)
            devices = {}
            for name, attached in sorted(self.registry.devices.items()):
                plan = planner.plan(name, attached.interface)
                devices[name] = {
                    "address": attached.endpoint.address,
                    "interface": attached.interface.name,
                    "differences": self._applier.differences(attached, plan),
                }
            links = links_to_json(dict(sorted(self._links.items())))
            return {"backend": self._applier.facts()["backend"], "devices": devices, "links": links}

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return drops at queues, the lateness of packets, and bytes sent; ``reset`` resets the lateness."""
        with self._lock:
            self.registry.release_ended()
            return self._applier.statistics(self.registry.devices, reset)

    def close(self) -> None:
        """Release everything; the settings of the devices stay."""
        with self._lock:
            self.registry.close()
            self._applier.close()
            self._pool.shutdown()

    def probe(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure these links; raises InputError for an unknown link or one whose device does not run."""
        names = set(chain.from_iterable(pairs))
        with self._lock:
            self.registry.release_ended()
            for pair in pairs:
                if pair not in self._links:
                    raise InputError(f"there is no link from {pair[0]} to {pair[1]}")
            for name in names - self.registry.devices.keys():
                raise InputError(f"'{name}' does not run: its links cannot be measured")
            links = {pair: self._links[pair] for pair in pairs}
            media = self._media(pairs)
            with contextlib.ExitStack() as stack:
                sites = self._prober.sites(names, stack)
                held = stack.pop_all()
        _LOG.info("measuring %d links", len(links))
        with held:
            return measure(links, sites, media) if links else []

    def open_ends(self, run: str, pairs: Sequence[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the port of the receiver of each device that is here."""
        with self._lock:
            return self._prober.open_ends(run, pairs)

    def probe_half(
        self, run: str, pairs: Sequence[Pair], ports: Mapping[str, int], begin: float
    ) -> list[dict[str, Any]]:
        """Measure links between this host and others, which do the same; see `probes.measure_half`.

        ``ports`` are those of all devices, of which the ones here are those of `open_ends`.
        """
        with self._lock:
            links = {pair: self._links[pair] for pair in pairs}
            sites, ends, held = self._prober.take_ends(run, set(chain.from_iterable(pairs)), ports)
            media = self._media(pairs)
        with held:
            return measure_half(links, sites, ends, bytes.fromhex(run), begin, media)

    def _media(self, pairs: Sequence[Pair]) -> dict[Pair, Route]:
        """Return the channels that these links have at the gate, as far as their senders are on this host."""
        interfaces = {name: each.interface for name, each in self.registry.devices.items()}
        return self._planner(self._links).media(pairs, interfaces)
