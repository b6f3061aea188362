"""Errors shown to users, each with the exit status of the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Key = tuple[str | int, ...]
"""Path of a value in a scenario, with the index of a list item as a number: ``("faults", 0, "when", "batch")``."""


def parse_key(dotted: str) -> Key:
    """Parse a dotted key; a part of digits is the index of a list item.

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


def reject_former_names(subclass: type, remedies: Mapping[str, str]) -> None:
    """Raise TypeError if a user's subclass defines an attribute of an earlier version, which would have no effect.

    ``remedies`` maps the former attributes to the ends of the error texts.

    >>> class Old:
    ...     begins = ("forward",)
    >>> reject_former_names(Old, {"begins": "write `span_names` instead"})
    Traceback (most recent call last):
    TypeError: Old.begins has no effect: write `span_names` instead
    """
    for name in remedies.keys() & vars(subclass).keys():
        text = f"{subclass.__name__}.{name} has no effect: {remedies[name]}"
        raise TypeError(text)


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, or list all known words.

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
    """Return a list with the known word most similar to the given one; empty without a similar word."""
    # Known words are lower-case, so a word in capitals would be similar to none of them.
    return difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)


@dataclass(frozen=True)
class Diagnostic:
    """One problem of a scenario.

    >>> str(Diagnostic(("devices", "a", "memory"), "is missing"))
    'devices.a.memory: is missing'
    """

    key: Key
    """Path of the invalid value in the scenario; empty for the scenario as a whole."""
    text: str
    """The problem and its remedy."""

    def __str__(self) -> str:
        return f"{format_key(self.key)}: {self.text}" if self.key else self.text


class TestbedError(Exception):
    """An error shown to the user as one line; exit status 1."""

    __test__ = False  # keeps pytest from collecting the class by its name
    exit_code = 1


class ExpectationError(TestbedError):
    """The run ended, but an ``expect`` condition of the scenario failed."""


class DivergedError(TestbedError):
    """The run ended with a non-finite loss."""

    exit_code = 4


class StoppedError(TestbedError):
    """The user has stopped a run, by Ctrl-C."""

    exit_code = 130


class InputError(TestbedError):
    """Invalid user input, with location, problem and remedy."""

    exit_code = 2

    def __init__(self, text: str, key: Key = ()) -> None:
        """Create the error with the problem and the remedy, and the key of the invalid value.

        The key is relative to the workload, ``("method", "stages")``, or to the scenario, ``("network", "topology")``
        or ``("devices", name, "memory")`` with the name of a single device.
        """
        super().__init__(str(Diagnostic(key, text)))
        self.text = text
        self.key = key


class HostError(TestbedError):
    """The host does not meet the requirements: no Docker engine, no traffic shaping, or too little disk space."""

    exit_code = 3
