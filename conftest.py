"""Settings, hooks and fixtures of all tests."""

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

# Imported modules are never freed, so collections during the imports only take time; see `pytest_collection_finish`.
gc.disable()

# Set before torch is imported: with several threads, operations on small tensors wait for threads that a busy host
# does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start background jobs with SIGINT ignored, and children inherit it; some tests send SIGINT to children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis draws the same examples in each run, with any duration, so that a failure is reproducible.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


NOT_MEASURED = "not measured here"
"""Start of the reason why a test of time was skipped."""
MAX_ATTEMPTS = 4
"""Attempts of a test marked ``timed``."""
MAX_UNDISTURBED_FAILURES = 2
"""Failed attempts on an undisturbed host after which a test marked ``timed`` fails."""
MAX_QUIET_WAIT = 40.0
"""Seconds to wait before each further attempt for other processes to leave the processors idle."""
TIMEOUT_MARGIN = 5.0
"""Seconds between the end of the last attempt and the time-out of the test."""

_START_TIME = pytest.StashKey[float]()


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collections, which took 5 to 10 % of the duration of the tests."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Store the start time of a test, since fixtures count towards the time-out."""
    item.stash[_START_TIME] = time.monotonic()


def deadline_of(item: pytest.Item) -> float:
    """Return the instant of a test's time-out, on the monotonic clock."""
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else item.config.getini("timeout")
    return item.stash[_START_TIME] + float(seconds)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Repeat a test marked ``timed`` until a success, or until two failures on an undisturbed host.

    A failure is no evidence of an error if other processes or a hypervisor used the processors. The test then waits for
    an undisturbed host, and is skipped as not measured if the disturbance lasts.
    """
    if pyfuncitem.get_closest_marker("timed") is None:
        return None
    from tests.helpers.hostload import (
        describe_disturbance,
        run_monitored,
        wait_until_quiet,
    )

    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    deadline = deadline_of(pyfuncitem)
    undisturbed_failures, reason = 0, None
    for _ in range(MAX_ATTEMPTS):
        start = time.monotonic()
        failure, host_load = run_monitored(lambda: pyfuncitem.obj(**arguments))
        if failure is None:
            return True
        reason = describe_disturbance(host_load)
        if reason is None:
            undisturbed_failures += 1
        now = time.monotonic()
        # Another attempt may take twice as long as this one.
        next_attempt = 2 * (now - start)
        remaining = deadline - now - next_attempt - TIMEOUT_MARGIN
        if undisturbed_failures == MAX_UNDISTURBED_FAILURES:
            raise failure
        if remaining < 0:
            if undisturbed_failures:
                raise failure
            break
        wait_until_quiet(min(MAX_QUIET_WAIT, remaining))
    pytest.skip(f"{NOT_MEASURED}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons of all skipped tests in one line, and count the timing tests for ``tests/run``."""
    counts_file = os.environ.get("TESTBED_TIMED_COUNTS")
    is_worker = hasattr(terminalreporter.config, "workerinput")
    if counts_file and not is_worker:
        timed, not_measured = count_timed_tests(terminalreporter)
        with Path(counts_file).open("a") as file:
            file.write(f"{timed} {not_measured}\n")
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        # The report of a skipped test is (file, line, reason).
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        counted = [f"{count} x {reason}" for reason, count in reasons.most_common()]
        line = f"skipped: {'; '.join(counted)}"
        terminalreporter.write_line(line, yellow=True)


def count_timed_tests(reporter: pytest.TerminalReporter) -> tuple[int, int]:
    """Return the number of timing tests, and the number of tests skipped as not measured."""
    timed, not_measured = 0, 0
    for outcome in ("passed", "failed", "skipped"):
        for report in reporter.stats.get(outcome, ()):
            # Each test has reports of its setup and teardown, too; a test skipped in its setup has no other.
            is_result = report.when == "call" or report.skipped
            if "timed" not in report.keywords or not is_result:
                continue
            timed += 1
            if report.skipped and NOT_MEASURED in str(report.longrepr):
                not_measured += 1
    return timed, not_measured


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordingLab:
    """Return a lab without containers."""
    from tests.helpers.recording_lab import RecordingLab

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RecordingLab()
