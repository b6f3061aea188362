"""The errors a user may meet, each with the exit status of the command that ends in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[str | int, ...]
"""The way to a value: ``("faults", 0, "when", "batch")``."""


def parse_key(dotted: str) -> Key:
    """Read a key as a user writes it: ``faults.0.when.batch``."""
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def format_key(key: Key) -> str:
    """Write a key as a user would."""
    return ".".join(str(part) for part in key)


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known word was meant, or which there are."""
    words = list(known)
    close = closest(word, words)
    return f"did you mean '{close[0]}'?" if close else "there are " + ", ".join(words)


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known word that resembles one most; nothing where none does."""
    return difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)


@dataclass(frozen=True)
class Diagnostic:
    """One thing wrong with a scenario."""

    key: Key
    text: str
    """What is wrong; what would be right."""

    def __str__(self) -> str:
        return f"{format_key(self.key)}: {self.text}" if self.key else self.text


class TestbedError(Exception):
    """Something went wrong that the user should read in one line; the command exits with 1."""

    __test__ = False  # keeps pytest from collecting the class by its name
    exit_code = 1


class ExpectationError(TestbedError):
    """The run ended, but an ``expect`` condition of its scenario does not hold."""


class DivergedError(TestbedError):
    """The run ended, but its loss is not a finite number."""

    exit_code = 4


class StoppedError(TestbedError):
    """The user has stopped a run, by Ctrl-C."""

    exit_code = 130


class InputError(TestbedError):
    """What the user wrote cannot be used: says where, what is wrong and what would be right."""

    exit_code = 2

    def __init__(self, text: str, key: Key = ()) -> None:
        """Say what is wrong and what would be right, of the value at a key.

        Its key is one of the workload, ``("method", "stages")``, or of the scenario, ``("network", "topology")`` or
        ``("devices", name, "memory")`` with the name of a single device.
        """
        super().__init__(str(Diagnostic(key, text)))
        self.text = text
        self.key = key


class HostError(TestbedError):
    """This machine cannot serve: no Docker engine, no way to shape links, no room."""

    exit_code = 3
