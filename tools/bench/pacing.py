"""Accuracy of pacing: spans of 5 ms and more on four devices at once, on an idle and on a loaded host."""

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
from tools.bench.measurement import Measurement

DEVICES = 4
"""Number of processes that pace work at the same time."""
SECONDS = 3.0
"""Duration of a measurement in seconds."""
CHARGES = (0.005, 0.02, 0.05)
"""Charged times of the spans in seconds."""
TOLERANCE = 0.02
"""Maximum error of spans as a share of the charge: the mean, and the 99th percentile without reported lateness."""


@dataclass(frozen=True)
class Paced:
    """A paced span; times are in seconds.

    >>> span = Paced(charge=0.01, duration=0.012, late=0.002, deficit=0.0)
    >>> round(span.error, 3), round(span.unreported, 3)
    (0.2, 0.0)
    """

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
        """Error of the span without the time reported as late."""
        return abs((self.duration - self.late) / self.charge - 1)


@dataclass(frozen=True)
class Series:
    """The successive spans of one device."""

    spans: list[Paced]
    wall: float
    """Real time of all spans in seconds."""


def pace(devices: int = DEVICES, seconds: float = SECONDS) -> list[Series]:
    """Pace work in one process per device, all at the same time."""
    command = [sys.executable, "-m", "tools.bench.paced"]
    command += [json.dumps(CHARGES), str(seconds)]
    running = []
    for _ in range(devices):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        running.append(process)
    series = []
    for process in running:
        output, _ = process.communicate()
        result = json.loads(output)
        spans = [Paced(*span) for span in result["spans"]]
        series.append(Series(spans, result["wall"]))
    return series


@contextlib.contextmanager
def load_one_core() -> Iterator[None]:
    """Keep one core of the host busy within the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure() -> Iterator[Measurement]:
    """Yield the error of spans on an idle host and with one core loaded, with and without time reported as late."""
    for name, load in (
        ("idle", contextlib.nullcontext()),
        ("one core loaded", load_one_core()),
    ):
        spans: list[Paced] = []
        with load:
            for series in pace():
                spans += series.spans
        errors = [span.error for span in spans]
        unreported_errors = [span.unreported for span in spans]
        shortest, longest = min(CHARGES) * 1e3, max(CHARGES) * 1e3
        detail = (
            f"{len(spans)} spans of {shortest:g} to {longest:g} ms on {DEVICES} devices"
        )
        mean = fmean(errors)
        worst = float(np.percentile(errors, 99))
        yield Measurement(
            f"pacing, {name}: mean error of a span", mean, "", TOLERANCE, detail=detail
        )
        # Without a target: on a loaded host, a span may end late, and the run then reports the lateness.
        yield Measurement(
            f"pacing, {name}: 99th percentile of the error", worst, "", detail=detail
        )
        unreported = float(np.percentile(unreported_errors, 99))
        yield Measurement(
            f"pacing, {name}: the same beyond what is reported as late",
            unreported,
            "",
            TOLERANCE,
            detail=detail,
        )
