"""Traffic in total and by link: messages, casts, bytes and use of rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.network.link import Link
from testbed.trace.events import Event
from testbed.trace.traffic import METRICS, links
from testbed.wire.framing import cast_wire_bytes, wire_bytes
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import columns_of, metric_values

FINISHED = Event(1.0, "a", "state", {"state": "finished"})
"""The end of a run of 1 s."""


def send_event(time: float, source: str, target: str, size: int) -> Event:
    fields = {
        "peer": target,
        "message": "m",
        "bytes": size,
        "start": time,
        "duration": 0.0,
        "queued": 0.0,
    }
    return Event(time, source, "send", fields)


def cast_event(time: float, size: int, duration: float, **fields: Any) -> Event:
    """Return a cast of device a to device b."""
    cast = {"peers": ["b"], "message": "hello", "bytes": size, "start": time}
    return Event(time, "a", "cast", {**cast, "duration": duration, **fields})


def test_link_shows_requested_and_measured_properties_and_use() -> None:
    link = recorded_metrics()["links"][0]
    assert (link["source"], link["destination"]) == ("a", "b")
    # Seven messages of 100 kB in 8.6 s.
    assert link["messages"] == 7
    assert link["bytes"] == 700_000
    assert link["requested"]["rate"] == 8e6
    assert link["measured"] == {
        "rate": 7.9e6,
        "delay": 0.0101,
        "loss": 0.0,
        "packets": 50,
    }
    bits = 7 * wire_bytes(100_000) * 8
    assert link["used_share"] == pytest.approx(bits / 8e6 / 8.6)


def test_cast_is_one_transmission_and_message_of_each_link() -> None:
    cast = cast_event(0.1, size=50, duration=0.1)
    metrics = calm_metrics(events=[cast, FINISHED])
    assert metrics["bytes_sent"] == 50
    assert metrics["links"][0]["messages"] == 1


def test_reception_is_share_of_casts_received_by_addressees() -> None:
    received = {
        "peer": "a",
        "message": "hello",
        "bytes": 50,
        "start": 0.0,
        "duration": 0.1,
        "decode": 0.0,
    }
    events = [
        cast_event(0.1, size=50, duration=0.1, number=0),
        Event(0.2, "b", "receive", {**received, "cast": 0}),
        # A message, which is no cast.
        Event(0.5, "b", "receive", received),
        cast_event(0.6, size=50, duration=0.3, number=1),
        FINISHED,
    ]
    metrics = calm_metrics(events=events)
    assert metrics["casts"] == 2
    assert metrics["reception"] == 0.5
    # The mean of 0.1 and 0.3 s.
    assert metrics["cast_time"] == pytest.approx(0.2)
    assert metrics["links"][0]["casts"] == 2
    assert metrics["links"][0]["casts_heard"] == 1


def test_run_without_casts_has_no_metrics_of_casts() -> None:
    assert "casts" not in calm_metrics(events=[FINISHED])


def rows_by_link(
    *events: Event, **changes: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a run of 1 s by source and destination."""
    record = recorded.make_calm_record(events=[*events, FINISHED], **changes)
    return {(row["source"], row["destination"]): row for row in links(record)}


def test_use_of_link_sums_wire_bytes_of_single_messages() -> None:
    row = rows_by_link(
        send_event(0.1, "a", "b", 10),
        send_event(0.2, "a", "b", 100_000),
        cast_event(0.3, size=3000, duration=0.0),
    )["a", "b"]
    assert row["messages"] == 3
    assert row["bytes"] == 10 + 100_000 + 3000
    assert row["casts"] == 1
    # 1 s at 8 Mbit/s is a million bytes.
    on_wire = wire_bytes(10) + wire_bytes(100_000) + cast_wire_bytes(3000)
    assert row["used_share"] == pytest.approx(on_wire / 1e6)


def test_links_without_messages_and_measurement_are_omitted() -> None:
    assert rows_by_link(links=[]) == {}
    message = send_event(0.1, "b", "a", 10)
    assert list(rows_by_link(message, links=[])) == [("b", "a")]
    # Both links of the recorded run are measured; the order is that of the experiment.
    assert list(rows_by_link(message)) == [("a", "b"), ("b", "a")]


def test_messages_without_link_are_in_last_row() -> None:
    rows = rows_by_link(
        send_event(0.1, "a", "c", 10), send_event(0.2, "a", "b", 10), links=[]
    )
    assert list(rows) == [("a", "b"), ("a", "c")]
    unknown = rows["a", "c"]
    assert unknown["requested"] is None
    assert unknown["rate_at_best"] is None
    assert unknown["used_share"] is None
    assert unknown["messages"] == 1


def test_link_without_rate_has_no_used_share() -> None:
    events = [send_event(0.1, "a", "b", 10), FINISHED]
    record = recorded.make_calm_record(events=events, links=[])
    record.experiment = replace(record.experiment, links={("a", "b"): Link()})
    assert links(record)[0]["used_share"] is None


def test_rate_of_link_is_limited_by_uplink_of_sender() -> None:
    record = recorded.make_calm_record()
    a, b = record.experiment.devices
    devices = (a, replace(b, uplink=2e6))
    record.experiment = replace(record.experiment, devices=devices)
    rows = columns_of(links(record), "source", "rate_at_best")
    assert rows == [("a", 8e6), ("b", 2e6)]


def test_totals_count_messages_and_bytes_of_kernel() -> None:
    record = recorded.make_calm_record(fidelity={"sent": {"a": 700, "b": 50}})
    metrics = metric_values(METRICS, record)
    # Five steps with a message of 100 kB in each direction.
    assert metrics["messages"] == 10
    assert metrics["bytes_sent"] == 1_000_000
    assert metrics["bytes_received"] == 1_000_000
    assert metrics["wire_bytes"] == 700 + 50
    for name in ("casts", "cast_time", "reception"):
        assert metrics[name] is None


def test_bytes_on_wire_are_unknown_without_kernel_counts() -> None:
    metrics = metric_values(METRICS, recorded.make_calm_record())
    assert metrics["wire_bytes"] is None
