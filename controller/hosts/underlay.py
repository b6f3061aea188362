"""What the way between two hosts adds to links that cross it, and what is left to impose. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from controller.shaping import tolerance
from testbed.common.errors import InputError
from testbed.network.impairments import median_delay
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement

Way = tuple[str, str]
"""From one host to another."""


def combined(
    asked: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[Way, tuple[float, float]]]:
    """Put together what hosts measured of links between them; also return what `_between` does.

    ``halves`` are those of `controller.shaping.probes.measure_half` by host, ``host`` says where each device is, and
    ``offsets`` what each host's clock shows beyond ours, in seconds.
    """
    found = {(name, each["source"], each["destination"]): each for name, half in halves.items() for each in half}
    raw = {pair: found[host[pair[1]], *pair]["delays"] for pair in asked}
    moved = _between({pair: (link, statistics.median(raw[pair])) for pair, link in asked.items() if raw[pair]}, host)
    measured = []
    for (source, destination), link in asked.items():
        way, here = (host[source], host[destination]), found[host[destination], source, destination]
        difference, _ = moved.get(way, (offsets[way[1]] - offsets[way[0]], 0.0))
        delays, sent = [delay - difference for delay in here["delays"]], found[way[0], source, destination]["sent"]
        delay = statistics.median(delays) if delays else None
        slowest, lost = replace(link, rate=here["asked"]), sent - len(delays)
        measured.append(
            LinkMeasurement(
                source,
                destination,
                requested=link,
                rate=here["rate"],
                delay=delay,
                loss=lost / sent if sent else None,
                packets=sent,
                problem=tolerance.problem(slowest, here["rate"], delay, sent, lost),
            )
        )
    return measured, moved


def _between(raw: Mapping[Pair, tuple[Link, float]], host: Mapping[str, str]) -> dict[Way, tuple[float, float]]:
    """Return what the clock at the end of a way shows beyond that at its beginning, where packets went both ways.

    And the round trip that the ways have beside what is asked of their links.

    What is more than asked on one way and less on the other is the clocks'. Packets of the data network say it much
    better than the connections of the contexts do.
    """
    beyond: dict[Way, list[float]] = {}
    for pair, (link, delay) in raw.items():
        beyond.setdefault((host[pair[0]], host[pair[1]]), []).append(delay - median_delay(link))
    least = {way: statistics.median(found) for way, found in beyond.items()}
    both = [way for way in least if way[::-1] in least]
    return {(a, b): ((least[a, b] - least[b, a]) / 2, max(0.0, least[a, b] + least[b, a])) for a, b in both}


def samples(links: Mapping[Pair, Link], host: Mapping[str, str]) -> list[Pair]:
    """Return for each way between hosts the link that says most of it: fast, and with little chance in its delay."""
    best: dict[Way, tuple[tuple[float, float, float], Pair]] = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        if way[0] != way[1] and link.up:
            rank = (link.jitter, link.loss, -(link.rate or 1e12))
            best[way] = min(best.get(way, (rank, pair)), (rank, pair))
    return [pair for _, pair in best.values()]


def ways(measured: Iterable[LinkMeasurement], host: Mapping[str, str]) -> dict[Way, float]:
    """Return by how many seconds more than asked each way delays, given measurements of links imposed as asked."""
    return {
        (host[each.source], host[each.destination]): max(0.0, each.delay - median_delay(each.requested))
        for each in measured
        if each.delay is not None
    }


def imposed(links: Mapping[Pair, Link], host: Mapping[str, str], delays: Mapping[Way, float]) -> dict[Pair, Link]:
    """Return what shapers are to do so that links are as asked: what is asked without what their ways have already.

    Raises InputError for a link that is asked to be shorter than its way.
    """
    found = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        there = delays.get(way, 0.0)
        if link.up and there > link.delay + tolerance.delay_tolerance(link.delay):
            raise InputError(
                f"the link {pair[0]} -> {pair[1]} asks for a delay of {link.delay * 1e3:g} ms, and the way from "
                f"{way[0]} to {way[1]} has {there * 1e3:.2f} ms already: put both on one host with --place, or give "
                "the link a longer delay"
            )
        found[pair] = replace(link, delay=max(0.0, link.delay - there)) if there else link
    return found
