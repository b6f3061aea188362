"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.helpers.recording_lab import RecordingLab

# While tests are imported nothing of them ends: see `pytest_collection_finish`.
gc.disable()

# Before anything imports torch: with several threads, tiny tensors wait for threads that a busy machine does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start background jobs with SIGINT ignored, and children inherit that: some tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however long a busy host takes for one: a suite that fails only now and then is broken.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


NOT_MEASURED = "not measured here"
ATTEMPTS = 4
"""Times that a test of time is made, until it passes or has failed twice on a host that was all its own."""
AWAITED = 40.0
"""Seconds that it waits, each time, for others to leave the host alone; less where its time-out is near."""


_BEGAN = pytest.StashKey[float]()


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, which stays: it took 5 to 10 % of the tests' time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when a test began, for its time-out counts what its fixtures take."""
    item.stash[_BEGAN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Repeat a test marked ``timed`` that fails: what is wrong fails twice on a host that nobody disturbs.

    A failure while others, or a hypervisor, kept the processors says nothing: the test waits for them. Where they go on
    it is skipped as not measured.
    """
    if pyfuncitem.get_closest_marker("timed") is None:
        return None
    from tests.helpers.hostload import (
        describe_disturbance,
        run_monitored,
        wait_until_quiet,
    )

    arguments = {
        name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames
    }
    failed, found = 0, None
    marker = pyfuncitem.get_closest_marker("timeout")
    until = pyfuncitem.stash[_BEGAN] + float(
        marker.args[0] if marker else pyfuncitem.config.getini("timeout")
    )
    for _ in range(ATTEMPTS):
        began = time.monotonic()
        failure, seen = run_monitored(lambda: pyfuncitem.obj(**arguments))
        if failure is None:
            return True
        found = describe_disturbance(seen)
        failed += found is None
        left = until - time.monotonic() - 2 * (time.monotonic() - began) - 5.0
        if failed == 2 or (failed and left < 0):
            raise failure
        if left < 0:
            break
        wait_until_quiet(min(AWAITED, left))
    pytest.skip(f"{NOT_MEASURED}: {found}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was not proved, and why; count the tests of time for ``tests/run``."""
    counts = os.environ.get("TESTBED_TIMED_COUNTS")
    if counts and not hasattr(terminalreporter.config, "workerinput"):
        ended = [
            each
            for group in ("passed", "failed", "skipped")
            for each in terminalreporter.stats.get(group, ())
        ]
        timed = [
            each
            for each in ended
            if "timed" in each.keywords and (each.when == "call" or each.skipped)
        ]
        skipped = sum(
            each.skipped and NOT_MEASURED in str(each.longrepr) for each in timed
        )
        with Path(counts).open("a") as file:
            file.write(f"{len(timed)} {skipped}\n")
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        found = "; ".join(
            f"{count} x {reason}" for reason, count in reasons.most_common()
        )
        terminalreporter.write_line(f"not proved here: {found}", yellow=True)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordingLab:
    """Return a lab without containers."""
    from tests.helpers.recording_lab import RecordingLab

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RecordingLab()
