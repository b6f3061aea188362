"""Errors shown to users, each with the exit status of the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Key = tuple[str | int, ...]
"""The way to a value: ``("faults", 0, "when", "batch")``."""


def parse_key(dotted: str) -> Key:
    """Parse a dotted key; a number is the place in a list.

    >>> parse_key("faults.0.when.batch")
    ('faults', 0, 'when', 'batch')
    """
    key: list[str | int] = []
    for part in dotted.split("."):
        key.append(int(part) if part.isdecimal() else part)
    return tuple(key)


def format_key(key: Key) -> str:
    """Write a key as a user would.

    >>> format_key(("faults", 0, "when"))
    'faults.0.when'
    """
    return ".".join(str(part) for part in key)


def reject_former_names(made: type, remedies: Mapping[str, str]) -> None:
    """Raise TypeError if a class defines a name of an earlier version, which nothing would use any more.

    >>> class Old:
    ...     begins = ("forward",)
    >>> reject_former_names(Old, {"begins": "write `span_names` instead"})
    Traceback (most recent call last):
    TypeError: Old.begins has no effect: write `span_names` instead
    """
    for name in remedies.keys() & vars(made).keys():
        raise TypeError(f"{made.__name__}.{name} has no effect: {remedies[name]}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, or list all of them.

    >>> nearest("pipelien", ["pipeline", "gpipe"])
    "did you mean 'pipeline'?"
    >>> nearest("x", ["mesh", "star"])
    'choose one of mesh, star'
    """
    words = list(known)
    close = closest(word, words)
    if close:
        return f"did you mean '{close[0]}'?"
    return "choose one of " + ", ".join(words)


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known word most similar to the given one; empty without a similar word."""
    # Known words are lower-case, so a word in capitals is similar to none of them as written.
    return difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)


@dataclass(frozen=True)
class Diagnostic:
    """One problem of a scenario.

    >>> str(Diagnostic(("devices", "a", "memory"), "is missing"))
    'devices.a.memory: is missing'
    """

    key: Key
    text: str
    """The problem and its remedy."""

    def __str__(self) -> str:
        return f"{format_key(self.key)}: {self.text}" if self.key else self.text


class TestbedError(Exception):
    """An error shown to the user as one line; exit status 1."""

    __test__ = False  # keeps pytest from collecting the class by its name
    exit_code = 1


class ExpectationError(TestbedError):
    """The run ended, but an ``expect`` condition of its scenario failed."""


class DivergedError(TestbedError):
    """The run ended with a loss that is not finite."""

    exit_code = 4


class StoppedError(TestbedError):
    """The user has stopped a run, by Ctrl-C."""

    exit_code = 130


class InputError(TestbedError):
    """Invalid user input, with its location, the problem and a remedy."""

    exit_code = 2

    def __init__(self, text: str, key: Key = ()) -> None:
        """Describe the problem and its remedy for the value at a key.

        Its key is one of the workload, ``("method", "stages")``, or of the scenario, ``("network", "topology")`` or
        ``("devices", name, "memory")`` with the name of a single device.
        """
        super().__init__(str(Diagnostic(key, text)))
        self.text = text
        self.key = key


class HostError(TestbedError):
    """The host does not meet the requirements: no Docker engine, no traffic shaping, or too little disk space."""

    exit_code = 3
