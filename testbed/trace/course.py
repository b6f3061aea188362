"""Metrics of the run as a whole, and its verdict."""

from __future__ import annotations

from testbed.trace.host import added_time
from testbed.trace.metrics_spec import Metric, Row
from testbed.trace.verdict import verdict

METRICS = (
    Metric(
        "duration",
        "seconds",
        ("time from the start of the workload to the end of the coordinator's program"),
        lambda record: record.end,
        brief=True,
        compared=True,
    ),
    Metric(
        "host_share",
        "share",
        (
            "share of the undisturbed steps or requests that the host added to "
            "their critical paths"
        ),
        lambda record: record.cached(added_time).share,
    ),
    Metric(
        "trusted",
        "bool",
        "whether the verdict is trusted",
        lambda record: bool(record.cached(verdict)["trusted"]),
    ),
    Metric(
        "status",
        "text",
        "finished, failed, timed out or interrupted",
        lambda record: record.outcome.status,
    ),
)

ROWS = (Row("Duration", "{duration}", "of the workload, without setup"),)
