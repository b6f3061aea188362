"""The shaper of a run, as the controller speaks to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import requests

from controller.lab.client import Client, refusal
from controller.shaping.plan import Endpoint
from testbed.common.errors import HostError, InputError
from testbed.network.link import Link, Pair, links_to_json
from testbed.network.topology import Cell
from testbed.trace.outcome import LinkMeasurement


def attachment(
    endpoints: Iterable[Endpoint], links: Mapping[Pair, Link], seed: int, cells: Iterable[Cell]
) -> dict[str, Any]:
    """Return what the shaper is asked to attach."""
    return {
        "endpoints": [dataclasses.asdict(each) for each in endpoints],
        "links": links_to_json(links),
        "seed": seed,
        "cells": [dataclasses.asdict(each) for each in cells],
    }


class Shaper:
    """Shapes the links of one run. Every method raises HostError when a rule did not take."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._client = Client(url, token)

    def _request(self, method: str, path: str, json: Any = None, timeout: float = 60.0) -> Any:
        try:
            answer = self._client.request(method, path, json=json, timeout=timeout)
        except requests.RequestException as error:
            raise HostError(f"the shaper at {self._url} does not answer: {error}; is the lab up?") from error
        if answer.ok:
            return answer.json()
        raise (InputError if answer.status_code == 400 else HostError)(f"shaper: {refusal(answer)}")

    def facts(self) -> dict[str, Any]:
        """Return ``kernel``, ``backend``, ``hostname``, ``monotonic`` and ``time`` (clocks, seconds) of its host."""
        facts: dict[str, Any] = self._request("GET", "/facts")
        return facts

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        seed: int = 0,
        cells: Iterable[Cell] = (),
    ) -> None:
        """Build the links of these devices and the cells of the run; again for one that has restarted.

        Devices attached before are adapted. A pair of attached devices without a link cannot talk.
        """
        self._request("POST", "/attach", attachment(endpoints, links, seed, cells))

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links, live; no other link notices."""
        self._request("POST", "/set", {"links": links_to_json(links)})

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure these links between the devices themselves; a few seconds for a lab."""
        answer = self._request("POST", "/probe", {"pairs": [list(pair) for pair in pairs]}, timeout=120)
        return [LinkMeasurement.from_json(each) for each in answer["measurements"]]

    def open_ends(self, run: str, pairs: Iterable[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the port of each device that is there. ``run`` is 8 bytes as hex."""
        ports: dict[str, int] = self._request("POST", "/ends", {"run": run, "pairs": [list(pair) for pair in pairs]})[
            "ports"
        ]
        return ports

    def probe_half(
        self, run: str, pairs: Iterable[Pair], ports: Mapping[str, int], begin: float
    ) -> list[dict[str, Any]]:
        """Measure links between hosts, of which each does its half; see `controller.shaping.probes.measure_half`."""
        asked = {"run": run, "pairs": [list(pair) for pair in pairs], "ports": dict(ports), "begin": begin}
        found: list[dict[str, Any]] = self._request("POST", "/half", asked, timeout=120)["measurements"]
        return found

    def renew(self) -> None:
        """Let the container live for another lease."""
        self._request("POST", "/lease", timeout=5.0)

    def show(self) -> dict[str, Any]:
        """Return ``backend``, ``links`` and ``devices``; of each device where the kernel differs, read back now."""
        shown: dict[str, Any] = self._request("GET", "/show")
        return shown

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return drops at queues and the delay line's lateness; ``reset`` sets the lateness back to nothing."""
        figures: dict[str, Any] = self._request("GET", "/statistics" + ("?reset=1" if reset else ""))
        return figures
