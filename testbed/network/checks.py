"""Limits of links that hold for all link backends and the simulator, and limits of names and subnets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import NamedTuple

from testbed.network.link import GilbertElliott, Link

MIN_RATE = 8e3
"""Minimum rate in bit/s, at which a full packet takes 1.5 s. The kernel's units are too coarse for lower rates."""

MAX_RATE = 1e12
"""Maximum rate in bit/s, more than any backend achieves. A link without a rate is as fast as the host."""

SHAPER = "shaper"
"""Name of the container that shapes the links."""
RESERVED_NAMES = (
    *(SHAPER, "control", "data"),
    # A container resolves these to itself or to a group of hosts, whatever else its /etc/hosts holds.
    *("localhost", "ip6-localhost", "ip6-loopback", "ip6-localnet"),
    *("ip6-mcastprefix", "ip6-allnodes", "ip6-allrouters"),
)
"""Names that no device may have: those of the shaper, of the networks of a run, and of a container's own addresses."""
SMALLEST_PREFIX = 24
"""Prefix length of the smallest subnet: 253 addresses for containers."""
_RESERVED_ADDRESSES = 3
"""Unavailable addresses of every subnet: network, bridge and broadcast address."""


class LinkProblem(NamedTuple):
    """An invalid property of a link."""

    name: str
    """Field of `Link`, with a dot before a nested field: ``bursts.r``."""
    text: str
    """The problem, and the nearest valid value."""


def problems(link: Link) -> list[LinkProblem]:
    """Return the properties of a link not supported by any backend. All values are in SI units."""
    link_problems: list[LinkProblem] = []
    for name in ("delay", "jitter"):
        seconds = getattr(link, name)
        # Negated, so that NaN is refused as well: every comparison with NaN is false.
        if not 0 <= seconds < math.inf:
            text = f"a {name} of {_in_milliseconds(seconds)} is negative: use 0 or more"
            link_problems.append(LinkProblem(name, text))
    if link.rate is not None:
        rate_text = rate_problem(link.rate)
        if rate_text is not None:
            link_problems.append(LinkProblem("rate", rate_text))
    for name in ("loss", "message_loss", "duplicate", "reorder", "corrupt"):
        link_problems += _fraction_problems(name, getattr(link, name))
    for name in ("jitter_correlation", "loss_correlation"):
        link_problems += _correlation_problems(name, getattr(link, name))
    if link.limit is not None and link.limit < 1:
        link_problems.append(
            LinkProblem(
                "limit",
                f"a queue of {link.limit} packets blocks all traffic: use at least 1",
            )
        )
    # A value that is invalid by itself would be reported a second time as an invalid combination.
    if not link_problems:
        link_problems += _combination_problems(link)
    return link_problems


def prefix_for(devices: int) -> int:
    """Return the length of the network prefix for a number of devices: 24, or less for more than 253.

    >>> prefix_for(1000)
    22
    """
    prefix = SMALLEST_PREFIX
    while 2 ** (32 - prefix) < devices + _RESERVED_ADDRESSES:
        prefix -= 1
    return prefix


def has_room(subnet: IPv4Network, devices: int) -> bool:
    """Return whether a subnet has an address for every device."""
    return subnet.num_addresses >= devices + _RESERVED_ADDRESSES


def no_room_text(subnet: str, devices: int) -> str:
    """Return the error text for a subnet without enough addresses."""
    return f"'{subnet}' has no room for {devices} devices: write a range of /{prefix_for(devices)} or larger"


def rate_problem(rate: float) -> str | None:
    """Return the error text for a rate outside the limits; None for a valid rate."""
    # Negated, so that NaN is refused as well.
    if not rate >= MIN_RATE:
        return f"{rate:g}bit is below the lowest rate that can be shaped: use at least {MIN_RATE / 1e3:g}kbit"
    if rate > MAX_RATE:
        return f"{rate:g}bit exceeds the maximum rate: use at most {MAX_RATE / 1e9:g}gbit, or remove the rate"
    return None


def no_jitter_text(distribution: str) -> str:
    """Return the error text for a jitter distribution without jitter."""
    return (
        f"'{distribution}' requires a jitter: set `jitter`, or remove the distribution"
    )


def _fraction_problems(name: str, value: float) -> list[LinkProblem]:
    if value > 1:
        return [
            LinkProblem(name, f"{100 * value:g}% is more than 100%: use at most 100%")
        ]
    if not value >= 0:
        return [LinkProblem(name, f"{100 * value:g}% is not a fraction: use 0 to 100%")]
    return []


def _correlation_problems(name: str, value: float) -> list[LinkProblem]:
    # A Markov chain that never changes its state would lose all packets or none, whatever the loss.
    if value == 1:
        return [
            LinkProblem(
                name,
                "100% would treat all packets like the first one: use at most 99%",
            )
        ]
    return _fraction_problems(name, value)


def _combination_problems(link: Link) -> list[LinkProblem]:
    link_problems = [*_jitter_problems(link), *_loss_problems(link)]
    if link.reorder > 0 and link.delay == 0:
        text = "reordering requires a delay, which reordered packets skip: use a delay of at least 1ms"
        link_problems.append(LinkProblem("reorder", text))
    return link_problems


def _jitter_problems(link: Link) -> Iterator[LinkProblem]:
    if link.jitter > link.delay:
        jitter, delay = _in_milliseconds(link.jitter), _in_milliseconds(link.delay)
        text = f"a jitter of {jitter} is above the delay of {delay}: "
        text += f"use a jitter of at most {delay} or a delay of at least {jitter}"
        yield LinkProblem("jitter", text)
    if link.jitter == 0 and link.distribution != "normal":
        yield LinkProblem("distribution", no_jitter_text(link.distribution))
    if link.jitter == 0 and link.jitter_correlation > 0:
        text = "requires a jitter: set `jitter`, or remove the correlation"
        yield LinkProblem("jitter_correlation", text)


def _loss_problems(link: Link) -> Iterator[LinkProblem]:
    if link.bursts is None:
        # Correlated losses without losses are most likely a forgotten key.
        if link.loss_correlation > 0 and link.loss == 0:
            text = "requires a loss: set `loss`, or remove the correlation"
            yield LinkProblem("loss_correlation", text)
        return
    if link.loss_correlation > 0:
        text = "cannot be combined with `bursts`, which are correlated by themselves: remove one of the two"
        yield LinkProblem("loss_correlation", text)
    burst_problems = _burst_problems(link.bursts)
    # The mean loss of the bursts helps to choose, because `loss` would have to be equal to it.
    if link.loss > 0:
        average = f"; these bursts lose {100 * link.bursts.loss:.3g}%"
        if burst_problems:
            average = ""
        yield LinkProblem(
            "loss",
            f"'loss' and 'bursts' exclude each other: remove one of them{average}",
        )
    yield from burst_problems


def _burst_problems(bursts: GilbertElliott) -> list[LinkProblem]:
    link_problems = []
    for name in ("p", "r", "bad_loss", "good_loss"):
        link_problems += _fraction_problems(f"bursts.{name}", getattr(bursts, name))
    if not link_problems and bursts.p + bursts.r == 0:
        text = "with p and r both 0 the link never changes its state: use r above 0"
        link_problems.append(LinkProblem("bursts.r", text))
    return link_problems


def _in_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:g}ms"
