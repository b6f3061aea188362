"""Pacing: whether spans of 5 ms and more take what they are charged, on four devices at once, also on a loaded host."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from testbed_controller.lab.paths import ROOT
from tools.bench.figure import Measurement

DEVICES = 4
SECONDS = 3.0
CHARGES = (0.005, 0.02, 0.05)
TOLERANCE = 0.02


@dataclass(frozen=True)
class Paced:
    """One span."""

    charge: float
    duration: float
    late: float
    deficit: float

    @property
    def error(self) -> float:
        """Share of the charge by which the span took longer or shorter."""
        return abs(self.duration / self.charge - 1)

    @property
    def unreported(self) -> float:
        """The same, without what was reported to be late."""
        return abs((self.duration - self.late) / self.charge - 1)


@dataclass(frozen=True)
class Series:
    """The spans of one device, one after the other."""

    spans: list[Paced]
    wall: float
    """Seconds that all of them took by the clock."""


def pace(devices: int = DEVICES, seconds: float = SECONDS) -> list[Series]:
    """Have as many processes of the agent as there are devices pace work at once."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.paced",
        json.dumps(CHARGES),
        str(seconds),
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        for _ in range(devices)
    ]
    said = [json.loads(process.communicate()[0]) for process in running]
    return [
        Series([Paced(*span) for span in each["spans"]], each["wall"]) for each in said
    ]


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Keep one core of the host busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure() -> Iterator[Measurement]:
    """Yield the error of spans on an idle host and with one core loaded: all, and what was not reported as late."""
    for name, load in (
        ("idle", contextlib.nullcontext()),
        ("one core loaded", loaded()),
    ):
        with load:
            found = [span for series in pace() for span in series.spans]
        errors = [span.error for span in found]
        detail = f"{len(found)} spans of {min(CHARGES) * 1e3:g} to {max(CHARGES) * 1e3:g} ms on {DEVICES} devices"
        mean, worst = fmean(errors), float(np.percentile(errors, 99))
        yield Measurement(
            f"pacing, {name}: mean error of a span", mean, "", TOLERANCE, detail=detail
        )
        yield Measurement(
            f"pacing, {name}: 99th percentile of the error", worst, "", detail=detail
        )
        untold = float(np.percentile([span.unreported for span in found], 99))
        yield Measurement(
            f"pacing, {name}: the same beyond what is reported as late",
            untold,
            "",
            TOLERANCE,
            detail=detail,
        )
