"""What went over the network, in all and link by link."""

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


def test_links_show_requested_and_measured_and_their_use() -> None:
    there = recorded_metrics()["links"][0]
    assert (
        there["source"],
        there["destination"],
        there["messages"],
        there["bytes"],
    ) == ("a", "b", 7, 700_000)
    assert there["requested"]["rate"] == 8e6
    assert there["measured"] == {
        "rate": 7.9e6,
        "delay": 0.0101,
        "loss": 0.0,
        "packets": 50,
    }
    assert there["used_share"] == pytest.approx(7 * wire_bytes(100_000) * 8 / 8e6 / 8.6)


def test_a_cast_is_one_transmission_but_uses_every_link() -> None:
    cast = {
        "peers": ["b"],
        "message": "hello",
        "bytes": 50,
        "start": 0.0,
        "duration": 0.1,
    }
    found = calm_metrics(
        events=[
            Event(0.1, "a", "cast", cast),
            Event(1.0, "a", "state", {"state": "finished"}),
        ]
    )
    assert found["bytes_sent"] == 50
    assert found["links"][0]["messages"] == 1


def test_reception_is_the_share_of_casts_heard_by_those_they_were_for() -> None:
    cast = {"message": "hello", "bytes": 50, "start": 0.0, "duration": 0.1}
    heard = {
        "peer": "a",
        "message": "hello",
        "bytes": 50,
        "start": 0.0,
        "duration": 0.1,
        "decode": 0.0,
    }
    events = [
        Event(0.1, "a", "cast", {**cast, "peers": ["b"], "number": 0}),
        Event(0.2, "b", "receive", {**heard, "cast": 0}),
        Event(0.5, "b", "receive", heard),
        Event(0.6, "a", "cast", {**cast, "peers": ["b"], "duration": 0.3, "number": 1}),
        Event(1.0, "a", "state", {"state": "finished"}),
    ]
    found = calm_metrics(events=events)
    assert (found["casts"], found["reception"]) == (2, 0.5)
    assert found["cast_time"] == pytest.approx(0.2)
    assert (found["links"][0]["casts"], found["links"][0]["casts_heard"]) == (2, 1)
    assert "casts" not in calm_metrics(events=[events[-1]])


def send(time: float, source: str, target: str, size: int) -> Event:
    fields = {
        "peer": target,
        "message": "m",
        "bytes": size,
        "start": time,
        "duration": 0.0,
        "queued": 0.0,
    }
    return Event(time, source, "send", fields)


ENDED = Event(1.0, "a", "state", {"state": "finished"})


def rows(*events: Event, **changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    record = recorded.make_calm_record(events=[*events, ENDED], **changes)
    return {(row["source"], row["destination"]): row for row in links(record)}


def test_a_link_is_used_for_what_its_messages_weigh_on_the_wire_each_by_itself() -> (
    None
):
    small, large = send(0.1, "a", "b", 10), send(0.2, "a", "b", 100_000)
    cast = Event(
        0.3,
        "a",
        "cast",
        {"peers": ["b"], "message": "c", "bytes": 3000, "start": 0.3, "duration": 0.0},
    )
    found = rows(small, large, cast)["a", "b"]
    assert (found["messages"], found["bytes"], found["casts"]) == (3, 103_010, 1)
    # One second of 8 Mbit/s is a million bytes.
    weight = wire_bytes(10) + wire_bytes(100_000) + cast_wire_bytes(3000)
    assert found["used_share"] == pytest.approx(weight / 1e6)


def test_links_that_were_neither_used_nor_measured_are_left_out() -> None:
    assert rows(links=[]) == {}
    assert list(rows(send(0.1, "b", "a", 10), links=[])) == [("b", "a")]
    assert list(rows(send(0.1, "b", "a", 10))) == [("a", "b"), ("b", "a")], (
        "measured, in the order of the experiment"
    )


def test_what_went_where_no_link_is_known_is_shown_last() -> None:
    found = rows(send(0.1, "a", "c", 10), send(0.2, "a", "b", 10), links=[])
    assert list(found) == [("a", "b"), ("a", "c")]
    unknown = found["a", "c"]
    assert (unknown["requested"], unknown["rate_at_best"], unknown["used_share"]) == (
        None,
        None,
        None,
    )
    assert unknown["messages"] == 1


def test_a_link_without_a_rate_has_no_share_that_is_used() -> None:
    record = recorded.make_calm_record(
        events=[send(0.1, "a", "b", 10), ENDED], links=[]
    )
    record.experiment = replace(record.experiment, links={("a", "b"): Link()})
    assert links(record)[0]["used_share"] is None


def test_a_link_is_no_faster_than_its_devices() -> None:
    record = recorded.make_calm_record()
    slow = tuple(
        replace(each, uplink=2e6 if each.name == "b" else None)
        for each in record.experiment.devices
    )
    record.experiment = replace(record.experiment, devices=slow)
    assert [(row["source"], row["rate_at_best"]) for row in links(record)] == [
        ("a", 8e6),
        ("b", 2e6),
    ]


def test_bytes_in_all_are_those_of_messages_and_those_of_the_kernel_where_it_counted() -> (
    None
):
    record = recorded.make_calm_record(fidelity={"sent": {"a": 700, "b": 50}})
    found = {figure.name: figure.compute(record) for figure in METRICS}
    # Five steps, a message of 100 kB there and one back in each.
    assert (found["messages"], found["bytes_sent"], found["bytes_received"]) == (
        10,
        1_000_000,
        1_000_000,
    )
    assert found["wire_bytes"] == 750
    assert (found["casts"], found["cast_time"], found["reception"]) == (
        None,
        None,
        None,
    )
    assert (
        next(each for each in METRICS if each.name == "wire_bytes").compute(
            recorded.make_calm_record()
        )
        is None
    )
