"""The metrics of asynchronous training: recovery, repartitioning, replication, and versions of the weights.

Each section has the functions of its metrics first, then the metrics and tables; `DECLARED` collects all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from testbed.trace.disturbances import Recovery
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import (
    Column,
    Item,
    Metric,
    Metrics,
    MetricsSpec,
    Row,
    Table,
)
from testbed.trace.record import RunView

FETCHED_UNIT_KIND = "unit"
"""The kind of `testbed.ml.pipeline.messages.FetchedUnit`, which moves a unit to the device that needs it."""
REPLICA_KIND = "replica"
"""The kind of `testbed.ml.pipeline.messages.Replica`."""

# Recoveries: the phases "repartitioned", "redistributed" and "trained" of the method's recovery events.


def _received_bytes(record: RunView, start: float, end: float) -> float:
    """Return the bytes of weights and optimizer state received by devices in an interval, as messages."""
    received = 0
    for event in record.of("receive"):
        if start <= event.time <= end and event.fields["message"] == FETCHED_UNIT_KIND:
            received += event.fields["bytes"]
    return float(received)


def _recovery_time(item: Recovery, record: RunView) -> dict[str, Any]:
    """Return the times of a recovery's phases, the bytes moved and the case; None for a missing phase."""
    fields: dict[str, Any] = dict.fromkeys(
        ("repartitioned", "redistributed", "trained", "moved", "case")
    )
    repartition = item.phases.get("repartitioned")
    if repartition is not None:
        fields["repartitioned"] = repartition.time
        fields["case"] = repartition.fields.get("case")
    redistribution = item.phases.get("redistributed")
    if redistribution is not None:
        end = redistribution.time
        fields["redistributed"] = end
        fields["moved"] = _received_bytes(record, item.detected, end)
    first_batch = item.phases.get("trained")
    if first_batch is not None:
        fields["trained"] = first_batch.time
    return fields


def _all_recoveries(record: RunView) -> list[dict[str, Any]]:
    recoveries = []
    for item in record.recoveries:
        begin = {"struck": item.struck, "detected": item.detected}
        recoveries.append(begin | _recovery_time(item, record))
    return recoveries


def _outage_time(record: RunView, recovery: Item) -> float | None:
    """Return the seconds from the fault until a new batch was done."""
    struck = recovery["struck"]
    if struck is None:
        return None
    last_batch = -1
    for step in record.of("step"):
        batch = step.fields["step"]
        if step.time <= recovery["detected"]:
            last_batch = max(last_batch, batch)
        # Batches that the recovery has undone and that are trained again do not end the outage.
        elif batch > last_batch:
            return float(step.time - struck)
    return None


def _remaining_time(record: RunView) -> float | None:
    """Return the seconds from the last resumption to the last batch; 0 if the last batch was trained earlier."""
    resumed = [item.resumed for item in record.recoveries if item.resumed is not None]
    steps = record.of("step")
    if not resumed or not steps:
        return None
    return max(0.0, steps[-1].time - resumed[-1])


def _span_between(item: Item, start_event: str, end_event: str) -> float | None:
    """Return the seconds between two times of a recovery; None if either time is unknown."""
    first = item.get(start_event)
    last = item.get(end_event)
    if first is None or last is None:
        return None
    return float(last - first)


def _longest_time(seconds: Iterable[float | None]) -> float | None:
    # A recovery during which the run ended lacks its later phases.
    present = [time for time in seconds if time is not None]
    return max(present, default=None)


def _phase_metric(name: str, start_event: str, end_event: str, meaning: str) -> Metric:
    """Return the metric of the longest time between two events of a recovery."""

    def compute(record: RunView) -> float | None:
        times = []
        for item in record.cached(_all_recoveries):
            times.append(_span_between(item, start_event, end_event))
        return _longest_time(times)

    return Metric(name, "seconds", f"longest, {meaning}", compute)


def _longest_outage(record: RunView) -> float | None:
    times = []
    for recovery in record.cached(_all_recoveries):
        times.append(_outage_time(record, recovery))
    return _longest_time(times)


def _moved_bytes(record: RunView) -> float | None:
    """Return the bytes moved by all recoveries; None if no recovery has redistributed units."""
    recoveries = record.cached(_all_recoveries)
    moved = [item["moved"] for item in recoveries if item["moved"] is not None]
    if not moved:
        return None
    total: float = sum(moved)
    return total


def _listed_recoveries(metrics: Metrics) -> list[Item]:
    """Return the recoveries in which the coordinator chose a partition, or training continued without a choice."""
    recoveries = []
    for item in metrics["recovery_list"]:
        has_choice = item.get("repartitioned") is not None
        has_continued = item.get("trained") is not None
        if has_choice or has_continued:
            recoveries.append(item)
    return recoveries


RECOVERY_METRICS = (
    _phase_metric(
        "repartition_time",
        "detected",
        "repartitioned",
        "from the detection until the coordinator has chosen the new partition",
    ),
    _phase_metric(
        "redistribution_time",
        "repartitioned",
        "redistributed",
        "from this choice until all devices have received their weights",
    ),
    _phase_metric(
        "first_batch_time",
        "detected",
        "trained",
        "from the detection until the first batch after it was trained",
    ),
    Metric(
        "outage_time",
        "seconds",
        "maximum time from a fault until a new batch is trained, including repeated batches",
        _longest_outage,
    ),
    Metric(
        "remaining_time",
        "seconds",
        "time from the last resumption after a fault to the last trained batch",
        _remaining_time,
    ),
    Metric(
        "recovery_bytes",
        "bytes",
        "weights and optimizer state received in recoveries, as messages",
        _moved_bytes,
    ),
)

RECOVERY_TABLE = Table(
    "Recoveries",
    "How the method continued after a fault. Detection: from the injection. Repartition: from the detection until the "
    "coordinator has chosen the new partition. Redistribution: from then until all devices have received their "
    "weights. First batch: from the detection until a batch is trained again.",
    _listed_recoveries,
    (
        Column("Missing", "text", lambda item: ", ".join(item["missing"])),
        Column("Case", "text", "case", wide=True),
        Column("Batch", "number", "step", wide=True),
        Column(
            "Detection",
            "seconds",
            lambda item: _span_between(item, "struck", "detected"),
        ),
        Column(
            "Repartition",
            "seconds",
            lambda item: _span_between(item, "detected", "repartitioned"),
        ),
        Column(
            "Redistribution",
            "seconds",
            lambda item: _span_between(item, "repartitioned", "redistributed"),
        ),
        Column(
            "First batch",
            "seconds",
            lambda item: _span_between(item, "detected", "trained"),
        ),
        Column("Moved", "bytes", "moved"),
    ),
)


# Changes of the partition without a failure: the events "repartition".


def _all_repartitions(record: RunView) -> list[dict[str, Any]]:
    changes = []
    for event in record.of("repartition"):
        # Units move after the pipeline has run empty.
        drained = event.time - event.fields["seconds"] + event.fields["draining"]
        moved = _received_bytes(record, drained, event.time)
        changes.append({"time": event.time, **event.fields, "bytes": moved})
    return changes


def _longest_repartition(record: RunView, key: str) -> float | None:
    """Return a field of the longest repartition; None without repartitions."""
    changes = record.cached(_all_repartitions)
    longest = max(changes, key=lambda item: float(item["seconds"]), default={})
    return longest.get(key)


def _repartition_bytes(record: RunView) -> float | None:
    changes = record.cached(_all_repartitions)
    if not changes:
        return None
    total: float = sum(item["bytes"] for item in changes)
    return total


def _longest_moving(record: RunView) -> float | None:
    """Return the longest time of a repartition after the pipeline was empty."""
    times = []
    for item in record.cached(_all_repartitions):
        times.append(item["seconds"] - item["draining"])
    return _longest_time(times)


def _repartition_count(record: RunView) -> int | None:
    # Only asynchronous training, which records versions, changes its partition without a fault.
    if not record.of("versions"):
        return None
    return len(record.of("repartition"))


def _partition_text(item: Item) -> str:
    """Return the units of each device as text, for example ``a 0–2, b 3``."""
    texts = []
    for device, first, last in item["partition"]:
        texts.append(f"{device} {format_units(first, last)}")
    return ", ".join(texts)


def format_units(first: int, last: int) -> str:
    """Format the units from ``first`` to ``last`` (exclusive).

    >>> format_units(2, 5), format_units(2, 3), format_units(2, 2)
    ('2–4', '2', 'none')
    """
    if last <= first:
        return "none"
    if last == first + 1:
        return f"{first}"
    return f"{first}–{last - 1}"


REPARTITION_METRICS = (
    Metric(
        "repartitions",
        "number",
        "changes of the partition without a fault",
        _repartition_count,
    ),
    Metric(
        "repartition_pause",
        "seconds",
        "maximum time without a new batch during such a change, including draining",
        lambda record: _longest_repartition(record, "seconds"),
    ),
    Metric(
        "repartition_draining",
        "seconds",
        "part of this pause until the pipeline is empty",
        lambda record: _longest_repartition(record, "draining"),
    ),
    Metric(
        "repartition_moving",
        "seconds",
        "maximum time of such a change after draining: agreement and moves",
        _longest_moving,
    ),
    Metric(
        "repartition_bytes",
        "bytes",
        "weights and optimizer state received in such changes, as messages",
        _repartition_bytes,
    ),
)

REPARTITION_TABLE = Table(
    "Repartitions",
    "Changes of the partition during training. Pause: from the last batch that entered the pipeline until training "
    "continued. Draining: the part of the pause until the pipeline was empty. Moved: weights and optimizer state.",
    "repartition_list",
    (
        Column("At", "moment", "time"),
        Column("Batch", "number", "step", wide=True),
        Column("Units from then on", "text", _partition_text),
        Column("Pause", "seconds", "seconds"),
        Column("Draining", "seconds", "draining"),
        Column("Moved", "bytes", "bytes"),
    ),
)


# Replications, which share links with activations and gradients.


def _step_time_replicating(record: RunView) -> float | None:
    """Return the mean seconds of the batches during which any device received replicas."""
    arrivals = []
    for event in record.of("receive"):
        if event.fields["message"] == REPLICA_KIND:
            arrivals.append(event.time)
    seconds = []
    for step in record.steps:
        start, end = step.window
        # Events are in the order of time, so the arrivals within a step are counted by bisection.
        if bisect_right(arrivals, end) > bisect_left(arrivals, start):
            seconds.append(step.seconds)
    return fmean(seconds) if seconds else None


STEPS_BEFORE_REPLICATION = 9
"""FTPipeHD's Figure 6 begins with batch 190, nine batches before the replication that follows batch 199."""
STEPS_OF_REPLICATION = 4
"""The batch that ends with the replication and three later ones, which are under way meanwhile on three stages."""


def _last_replication(record: RunView) -> int | None:
    """Return the index in `RunView.steps` of the step ending with the last regular replication."""
    steps = record.steps
    if len(steps) < 2:
        return None
    device = steps[-1].device
    ends = [float(end) for _, end in record.spans(device, "compute", "replicate")]
    # The replication of the final state is not regular: the end of training causes it, not an interval of batches.
    regular_ends = [end for end in ends if end <= steps[-2].time]
    if not regular_ends:
        return None
    step_times = [step.time for step in steps]
    return bisect_left(step_times, max(regular_ends))


def _mean_of_steps(record: RunView, first: int, count: int) -> float | None:
    """Return the mean seconds of ``count`` steps from index ``first`` on; None if the run lacks some of the steps."""
    start = max(first, 0)
    steps = record.steps[start : first + count]
    if len(steps) < count:
        return None
    return fmean(step.seconds for step in steps)


def _replication_step_time(record: RunView) -> float | None:
    replication = record.cached(_last_replication)
    if replication is None:
        return None
    return _mean_of_steps(record, replication, STEPS_OF_REPLICATION)


def _step_time_before_replication(record: RunView) -> float | None:
    replication = record.cached(_last_replication)
    if replication is None:
        return None
    first = replication - STEPS_BEFORE_REPLICATION
    return _mean_of_steps(record, first, STEPS_BEFORE_REPLICATION)


REPLICATION_METRICS = (
    Metric(
        "step_time_replicating",
        "seconds",
        "mean of the batches during which weight replicas arrived",
        _step_time_replicating,
    ),
    Metric(
        "replication_step_time",
        "seconds",
        "mean of the batch that ends with the last regular replication and of the three next ones",
        _replication_step_time,
    ),
    Metric(
        "step_time_before_replication",
        "seconds",
        "mean of the nine batches before these",
        _step_time_before_replication,
    ),
)


# Versions of the weights: the events "versions", one for each stage and each stretch of training between two times at
# which the pipeline is empty.


def _most_versions(record: RunView) -> int | None:
    kept = [event.fields["kept"] for event in record.of("versions")]
    return max(kept, default=None)


def _list_versions(record: RunView) -> list[dict[str, Any]]:
    versions = []
    for event in record.of("versions"):
        versions.append({"device": event.device, **event.fields})
    return versions


def _versions_by_stretch(metrics: Metrics) -> list[Item]:
    """Return the versions of all stages in the first stretch of training, then in the next, and so on."""
    versions: Iterable[Item] = metrics.get("version_list", ())
    return sorted(versions, key=lambda item: (item["step"], item["stage"]))


VERSIONS_METRIC = Metric(
    "versions_kept",
    "number",
    "maximum number of weight versions stored by a stage",
    _most_versions,
)

VERSIONS_TABLE = Table(
    "Versions of the weights",
    "The maximum number of versions on each stage, in each stretch of training between two times at which the pipeline "
    "was empty. A stretch that a failure ended is missing. In use: versions that batches in flight needed. Kept: with "
    "the newest version, and versions for aggregation. Allowed: batches that may be in flight from this stage on. "
    "Replicas: of this and other stages.",
    _versions_by_stretch,
    (
        Column("Until batch", "number", "step", wide=True),
        Column("Stage", "number", "stage"),
        Column("Device", "text", "device"),
        Column("In use", "number", "in_use"),
        Column("Kept", "number", "kept"),
        Column("Allowed", "number", "allowed"),
        Column("Size", "bytes", "bytes"),
        Column("Replicas", "bytes", "replicas"),
    ),
)


def _changed_partitions(metrics: Metrics) -> bool:
    return bool(metrics.get("repartitions") or metrics["recoveries"])


def _pause_note(metrics: Metrics) -> str:
    pause = "longest pause of {repartitions} repartitions"
    if metrics["repartitions"] == 1:
        pause = "pause for a repartition"
    return pause + "; {repartition_draining} of it the pipeline ran empty"


def _busiest_note(metrics: Metrics) -> str:
    since = " since then" if _changed_partitions(metrics) else ""
    return f"of the time{since}, one device or link"


DECLARED = MetricsSpec(
    former_metrics={"outage": "outage_time", "rest": "remaining_time"},
    metrics=(
        *RECOVERY_METRICS,
        *REPARTITION_METRICS,
        *REPLICATION_METRICS,
        VERSIONS_METRIC,
    ),
    lists={
        "version_list": _list_versions,
        "repartition_list": _all_repartitions,
    },
    recovery=_recovery_time,
    events=(
        EventType(
            "stretch",
            "start of an interval of training with this batch",
            ("batch",),
            ("step", "in_flight", "partition", "configuration"),
        ),
        EventType(
            "repartition",
            "change of the partition before this batch",
            ("batch",),
            ("step", "partition", "seconds", "draining"),
            pause=True,
        ),
        EventType(
            "versions",
            "weight versions of a stage in the interval that ended before this batch",
            ("batch",),
            ("step", "stage", "in_use", "kept", "allowed", "bytes", "replicas"),
        ),
        EventType(
            "profile",
            "measured times of all units before training",
            (),
            ("seconds",),
        ),
        EventType(
            "bandwidth",
            "measured rate of a link",
            (),
            ("source", "destination", "rate"),
        ),
    ),
    rows=(
        Row(
            "Step time after",
            "{step_time_after}",
            "since the last recovery or repartition",
            when=_changed_partitions,
        ),
        Row(
            "Repartition",
            "{repartition_pause}",
            _pause_note,
            when=lambda metrics: "repartitions" in metrics,
        ),
        Row(
            "Busiest",
            "{busiest_share}",
            _busiest_note,
            when=lambda metrics: "versions_kept" in metrics,
        ),
        Row("Versions", "{versions_kept}", "of its weights, kept at once by a stage"),
    ),
    tables=(RECOVERY_TABLE, REPARTITION_TABLE, VERSIONS_TABLE),
)
