"""Shared by all tests."""

import os
import signal
from collections import Counter

import pytest
from hypothesis import settings

# Before anything imports torch: with several threads, tiny tensors wait for threads that a busy machine does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start background jobs with SIGINT ignored, and children inherit that: some tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however long a busy host takes for one: a suite that fails only now and then is broken.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


NOT_MEASURED = "not measured here"
AWAITED = 40.0
"""Seconds that a test of time waits, twice at most, for others to leave the host alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Repeat a test marked ``timed`` that fails while others keep the host busy, once they no longer do.

    Where they go on it is skipped as not measured. On a host that nobody else uses it is repeated once, at once: a
    hypervisor may have taken a processor for some milliseconds, which is not to be seen afterwards. What is wrong fails
    twice.
    """
    if pyfuncitem.get_closest_marker("timed") is None:
        return None
    from hostload import BUSY, await_quiet, load_by_others

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for attempt in range(3):
        try:
            pyfuncitem.obj(**arguments)
            break
        except AssertionError:
            if load_by_others() <= BUSY:
                if attempt > 0:
                    raise
            elif attempt == 2:
                pytest.skip(f"{NOT_MEASURED}: others keep the host busy")
            else:
                await_quiet(AWAITED)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was not proved, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        found = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"not proved here: {found}", yellow=True)
