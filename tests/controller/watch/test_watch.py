"""The page of a run: what it is told, and who may ask."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from testbed.faults.parts import ActionPart
from testbed.methods import METHODS
from testbed.scenario.expand import trials
from testbed.scenario.loading import load, parse
from testbed.trace.events import Event
from testbed_controller.report.thinning import MOST
from testbed_controller.results.recorder import Recorder
from testbed_controller.watch import feed
from testbed_controller.watch.feed import Tail, batches, select_shown
from testbed_controller.watch.server import PageServer, application, describe_run
from tests.helpers import ROOT, recorded
from tests.helpers.browser import CHROMIUM, Page, open_page

ORIGIN = "http://127.0.0.1:4000"


def asked(folder: Path, struck: list[Mapping[str, object]] | None = None):
    def strike(fault: Mapping[str, object]) -> str:
        assert struck is not None
        struck.append(fault)
        return "done"

    app = application(folder, "secret", ORIGIN, None if struck is None else strike)
    app.test_client_class = _Client
    return app.test_client()


class _Client(FlaskClient):
    def open(self, *args: object, **keys: object):
        return super().open(*args, **{"base_url": ORIGIN, **keys})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )


def test_the_page_knows_devices_and_links_and_loads_nothing(folder: Path) -> None:
    page = asked(folder).get("/?token=secret").text
    for device in recorded.make_trial().experiment.devices:
        assert device.name in page
    assert "src=" not in page
    assert page.count("href=") == page.count('href="data:,"')


def test_the_page_knows_which_events_of_the_method_were_pauses() -> None:
    drill = ROOT / "scenarios" / "demo" / "adaptation.yaml"
    assert describe_run(trials(load(drill))[0], METHODS["ftpipehd"].declared)[
        "pauses"
    ] == ["repartition"]


def test_who_has_no_token_learns_nothing(folder: Path) -> None:
    client = asked(folder, [])
    for answer in (
        client.get("/"),
        client.get("/events?token=wrong"),
        client.post("/strike", json={"kill": "a"}),
    ):
        assert answer.status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}],
)
def test_a_page_of_another_origin_cannot_strike(
    folder: Path, headers: dict[str, str]
) -> None:
    struck: list[Mapping[str, object]] = []
    authorised = {"Authorization": "Bearer secret"}
    answer = asked(folder, struck).post(
        "/strike", json={"kill": "worker1"}, headers=authorised | headers
    )
    assert answer.status_code == 403
    assert struck == []
    asked(folder, struck).post(
        "/strike", json={"kill": "worker1"}, headers=authorised | {"Origin": ORIGIN}
    )
    assert struck == [{"kill": "worker1"}]


def test_a_run_that_is_over_is_told_to_its_end(folder: Path) -> None:
    lines = asked(folder).get("/events?token=secret").text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert told[-1]["over"] == {"status": "finished", "error": None}
    names = {event["event"] for batch in told for event in batch["events"]}
    assert {"bar", "step", "fault"} <= names


def test_events_are_told_as_they_come(tmp_path: Path) -> None:
    begun = Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    feed = batches(begun.path, {"a", "b"})
    assert next(feed)["events"] == []
    step = next(event for event in recorded.make_events() if event.event == "step")
    begun.event(step)
    assert [event["event"] for event in next(feed)["events"]] == ["step"]
    begun.finish(recorded.make_outcome(events=[step]))
    assert next(feed)["over"] == {"status": "finished", "error": None}


def awaited(page: Page, script: str, value: object) -> object:
    """Return the value of a script once it is the given one, or after ten seconds."""
    found = page.evaluate(script)
    end = time.monotonic() + 10
    while found != value and time.monotonic() < end:
        time.sleep(0.1)
        found = page.evaluate(script)
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_generated_text_grows_token_by_token(tmp_path: Path) -> None:
    run = Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    server = PageServer(run.path)
    # The page makes the element with the first token.
    text = "document.getElementById('texts')?.textContent"
    try:
        with open_page(server.address) as page:
            for number, token in enumerate(("Once", " upon", "\na time")):
                fields = {"request": 0, "micro": number, "text": token}
                run.event(Event(0.1 * number, "a", "token", fields))
                shown = "request 0  " + "Once upon\na time"[: (4, 9, 16)[number]]
                assert awaited(page, text, shown) == shown
            status = "document.getElementById('status').textContent.split(' · ').pop()"
            assert awaited(page, status, "3 tokens") == "3 tokens"
            assert page.evaluate("document.getElementById('second').textContent") == (
                "Text"
            )
    finally:
        server.close()


def test_a_line_that_is_half_there_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read_lines() == []
    path.write_text('{"time": 1}\n{"ti')
    assert tail.read_lines() == [{"time": 1}]
    with path.open("a") as file:
        file.write('me": 2}\n')
    assert tail.read_lines() == [{"time": 2}]


@pytest.mark.parametrize("pace", [None, 1e9])
def test_a_run_of_any_length_is_read_a_block_at_a_time(
    folder: Path, pace: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "INTERVAL", 0.0)
    (whole,) = (batch for batch in batches(folder, {"a", "b"}, pace) if batch["over"])
    monkeypatch.setattr(feed, "BLOCK", 2000)
    pieces = list(batches(folder, {"a", "b"}, pace))
    assert len(pieces) > 3
    assert max(len(json.dumps(piece["events"])) for piece in pieces) < 5000
    assert [event for piece in pieces for event in piece["events"]] == whole["events"]
    assert pieces[-1]["over"] == whole["over"]


def test_old_bars_are_not_told() -> None:
    events = [
        {"time": time, "device": "a", "event": "compute", "duration": 0.5}
        for time in (1.0, 100.0)
    ]
    assert [event["start"] for event in select_shown(events, {"a"}, 100.0)] == [99.5]


def test_of_very_many_devices_the_first_are_drawn() -> None:
    many = recorded.make_trial(
        devices={
            "lead": {"speed": "1gflops"},
            "client": {"speed": "1gflops", "count": MOST + 100},
        },
        network={"topology": "star", "link": {"rate": "8mbit", "delay": "10ms"}},
        faults=[],
    )
    told = describe_run(many, METHODS["pipeline"].declared)
    assert (len(told["devices"]), told["left_out"]) == (MOST, 101)
    assert len(told["links"]) == 2 * (MOST - 1)
    bars = [
        {"time": 1.0, "device": name, "event": "compute"}
        for name in ("client1", f"client{MOST + 1}")
    ]
    assert [bar["device"] for bar in select_shown(bars, set(told["devices"]), 1.0)] == [
        "client1"
    ]


def test_what_is_nested_too_deeply_or_too_large_is_refused(folder: Path) -> None:
    struck: list[Mapping[str, object]] = []
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    for body, status in (
        ("[" * 30_000, 400),
        ('{"a":' * 10_000, 400),
        ("x" * 100_000, 413),
    ):
        assert (
            asked(folder, struck)
            .post("/strike", data=body, headers=headers)
            .status_code
            == status
        )
    assert struck == []


@pytest.mark.parametrize(
    "given", [[1], "kill", {"degrade": {"device": "source", "rate": "1" * 10_000}}]
)
def test_what_is_no_fault_is_refused_in_few_words(folder: Path, given: object) -> None:
    def strike(fault: Mapping[str, object]) -> str:
        return str(parse(ActionPart, dict(fault)))

    app = application(folder, "secret", ORIGIN, strike)
    app.test_client_class = _Client
    answer = app.test_client().post(
        "/strike", json=given, headers={"Authorization": "Bearer secret"}
    )
    assert answer.status_code == 400
    assert len(answer.data) < 5000
