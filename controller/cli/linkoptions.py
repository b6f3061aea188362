"""The figures of a link as options, for every command that takes some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import click

from testbed.common.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = {
    "preset": "A named set of figures, e.g. 4g.",
    "rate": "e.g. 10mbit",
    "delay": "One-way, e.g. 20ms",
    "jitter": "Standard deviation of the delay, e.g. 2ms",
    "distribution": "Of the jitter: normal, uniform or pareto.",
    "jitter_correlation": "Of successive packets' delays, e.g. 25%",
    "loss": "Each packet independently, e.g. 1%",
    "loss_correlation": "Of successive packets' fates, e.g. 25%",
    "bursts": "Gilbert-Elliott loss, e.g. p=1%,r=20%,bad-loss=100%,good-loss=0%",
    "message_loss": "Of casts, each lost whole, e.g. 10%",
    "duplicate": "Packets that arrive twice, e.g. 1%",
    "reorder": "Packets that skip the delay, e.g. 1%",
    "corrupt": "Packets with one bit wrong, e.g. 0.1%",
    "limit": "Packets that the queue before the rate holds.",
}


def link_options(command: F) -> F:
    """Give a command an option for each figure; it gets those that are given as ``figures``, see `read`."""

    @wraps(command)
    def with_figures(**arguments: Any) -> Any:
        figures = {name: value for name in _OPTIONS if (value := arguments.pop(name)) is not None}
        return command(figures=figures, **arguments)

    for name, text in reversed(_OPTIONS.items()):
        with_figures = click.option(f"--{name.replace('_', '-')}", name, help=text)(with_figures)
    return with_figures  # type: ignore[return-value]


def read(figures: Mapping[str, str]) -> dict[str, Any]:
    """Return figures as a scenario would have them.

    Raises InputError when there are none, or the bursts are not a list of ``key=value``.
    """
    if not figures:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in _OPTIONS)
        raise InputError(f"changes nothing: give at least one of {names}")
    found: dict[str, Any] = dict(figures)
    if "bursts" in found:
        pairs = [part.partition("=") for part in found["bursts"].split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise InputError(f"--bursts: '{found['bursts']}' is no list such as p=1%,r=20%")
        found["bursts"] = {key.strip().replace("-", "_"): value.strip() for key, _, value in pairs}
    return found
