"""The live page of a run: its content, its event stream, and access to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from testbed.faults.parts import ActionPart
from testbed.methods import METHODS
from testbed.scenario.expand import trials
from testbed.scenario.loading import load, parse
from testbed.trace.events import Event
from testbed_controller.report.thinning import MAX_SHOWN
from testbed_controller.results.recorder import Recorder
from testbed_controller.watch import feed
from testbed_controller.watch.feed import EventFile, batches, select_events
from testbed_controller.watch.server import PageServer, application, describe_run
from tests.helpers import ROOT, recorded
from tests.helpers.browser import CHROMIUM, Page, open_page

ORIGIN = "http://127.0.0.1:4000"
AUTHORISED = {"Authorization": "Bearer secret"}
FINISHED = {"status": "finished", "error": None}
Strike = Callable[[Mapping[str, object]], str]


class OriginClient(FlaskClient):
    """A client with the address of the page as base URL."""

    def open(self, *args: object, **keys: object) -> Any:
        return super().open(*args, **{"base_url": ORIGIN, **keys})


def make_client(folder: Path, strike: Strike | None = None) -> FlaskClient:
    """Return a client of the page; without ``strike``, the page offers no faults."""
    app = application(folder, "secret", ORIGIN, strike)
    app.test_client_class = OriginClient
    return app.test_client()


def start_recorder(tmp_path: Path) -> Recorder:
    folder = tmp_path / "run"
    return Recorder(folder, recorded.make_trial(), recorded.make_plan(), "emulate")


class RecordingStrike:
    """A replacement of the injection of faults, with the list of requested faults."""

    def __init__(self) -> None:
        self.faults: list[Mapping[str, object]] = []

    def __call__(self, fault: Mapping[str, object]) -> str:
        self.faults.append(fault)
        return "done"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )


def test_page_names_devices_and_loads_no_files(folder: Path) -> None:
    page = make_client(folder).get("/?token=secret").text
    for device in recorded.make_trial().experiment.devices:
        assert device.name in page
    assert "src=" not in page
    # An empty icon keeps browsers from asking for one.
    assert page.count("href=") == page.count('href="data:,"')


def test_page_has_names_of_pause_events_of_method() -> None:
    scenario = ROOT / "scenarios" / "demo" / "adaptation.yaml"
    (trial,) = trials(load(scenario))
    description = describe_run(trial, METHODS["ftpipehd"].declared)
    assert description["pauses"] == ["repartition"]


def test_requests_without_valid_token_are_refused(folder: Path) -> None:
    client = make_client(folder, RecordingStrike())
    for response in (
        client.get("/"),
        client.get("/events?token=wrong"),
        client.post("/strike", json={"kill": "a"}),
    ):
        assert response.status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}],
)
def test_page_of_another_origin_cannot_inject_faults(
    folder: Path, headers: dict[str, str]
) -> None:
    strike = RecordingStrike()
    client = make_client(folder, strike)
    fault = {"kill": "worker1"}
    response = client.post("/strike", json=fault, headers=AUTHORISED | headers)
    assert response.status_code == 403
    assert strike.faults == []
    client.post("/strike", json=fault, headers=AUTHORISED | {"Origin": ORIGIN})
    assert strike.faults == [fault]


def test_stream_of_finished_run_ends_with_status(folder: Path) -> None:
    # The format of server-sent events.
    text = make_client(folder).get("/events?token=secret").text
    messages = []
    for line in text.split("\n\n"):
        if line:
            messages.append(json.loads(line.removeprefix("data: ")))
    assert messages[-1]["over"] == FINISHED
    names = set()
    for message in messages:
        names.update(event["event"] for event in message["events"])
    assert {"bar", "step", "fault"} <= names


def test_events_are_streamed_during_run(tmp_path: Path) -> None:
    recorder = start_recorder(tmp_path)
    stream = batches(recorder.path, {"a", "b"})
    assert next(stream)["events"] == []
    step = next(event for event in recorded.make_events() if event.event == "step")
    recorder.event(step)
    assert [event["event"] for event in next(stream)["events"]] == ["step"]
    recorder.finish(recorded.make_outcome(events=[step]))
    assert next(stream)["over"] == FINISHED


def wait_for_value(page: Page, script: str, expected: object) -> object:
    """Evaluate a script repeatedly, for ten seconds or until the expected value; return the last value."""
    deadline = time.monotonic() + 10
    value = page.evaluate(script)
    while value != expected and time.monotonic() < deadline:
        time.sleep(0.1)
        value = page.evaluate(script)
    return value


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_generated_text_grows_token_by_token(tmp_path: Path) -> None:
    recorder = start_recorder(tmp_path)
    server = PageServer(recorder.path)
    # The page creates the element with the first token.
    text_script = "document.getElementById('texts')?.textContent"
    status = "document.getElementById('status').textContent.split(' · ').pop()"
    heading = "document.getElementById('second').textContent"
    text = "request 0  "
    try:
        with open_page(server.address) as page:
            for number, token in enumerate(("Once", " upon", "\na time")):
                fields = {"request": 0, "micro": number, "text": token}
                recorder.event(Event(0.1 * number, "a", "token", fields))
                text += token
                assert wait_for_value(page, text_script, text) == text
            assert wait_for_value(page, status, "3 tokens") == "3 tokens"
            assert page.evaluate(heading) == "Text"
    finally:
        server.close()


def test_incomplete_line_is_read_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event_file = EventFile(path)
    # The file does not exist yet.
    assert event_file.read_events() == []
    path.write_text('{"time": 1}\n{"ti')
    assert event_file.read_events() == [{"time": 1}]
    with path.open("a") as file:
        file.write('me": 2}\n')
    assert event_file.read_events() == [{"time": 2}]


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("", 0.0),
        ('{"time": 1}', 0.0),
        ('{"time": 1}\n', 1.0),
        ('{"time": 1}\n{"time": 2}\n{"ti', 2.0),
    ],
)
def test_newest_time_is_that_of_last_complete_line(
    tmp_path: Path, text: str, time: float
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    assert EventFile(path).latest_time() == time


@pytest.mark.parametrize("pace", [None, 1e9], ids=["live", "replayed"])
def test_long_run_is_read_in_blocks(
    folder: Path, pace: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "INTERVAL", 0.0)
    *_, complete = batches(folder, {"a", "b"}, pace)
    assert complete["over"]
    # Bytes: a small part of the recorded events.
    monkeypatch.setattr(feed, "BLOCK", 2000)
    parts = list(batches(folder, {"a", "b"}, pace))
    assert len(parts) > 3
    events = []
    for part in parts:
        # Bars have more keys than the events in the file.
        assert len(json.dumps(part["events"])) < 5000
        events += part["events"]
    assert events == complete["events"]
    assert parts[-1]["over"] == complete["over"]


def test_bars_before_visible_time_are_omitted() -> None:
    # At 100 s, the page shows the last 60 s.
    events = []
    for end in (1.0, 100.0):
        computation = {"device": "a", "event": "compute", "duration": 0.5}
        events.append({"time": end, **computation})
    bars = select_events(events, {"a"}, 100.0)
    assert [bar["start"] for bar in bars] == [99.5]


def test_only_first_of_many_devices_are_drawn() -> None:
    clients = MAX_SHOWN + 100
    trial = recorded.make_trial(
        devices={
            "lead": {"speed": "1gflops"},
            "client": {"speed": "1gflops", "count": clients},
        },
        network={"topology": "star", "link": {"rate": "8mbit", "delay": "10ms"}},
        faults=[],
    )
    description = describe_run(trial, METHODS["pipeline"].declared)
    assert len(description["devices"]) == MAX_SHOWN
    # The clients and the lead.
    assert description["left_out"] == 1 + clients - MAX_SHOWN
    # In a star, each drawn client has two links with the lead.
    assert len(description["links"]) == 2 * (MAX_SHOWN - 1)
    drawn = set(description["devices"])
    events = []
    for name in ("client1", f"client{MAX_SHOWN + 1}"):
        events.append({"time": 1.0, "device": name, "event": "compute"})
    assert [bar["device"] for bar in select_events(events, drawn, 1.0)] == ["client1"]


@pytest.mark.parametrize(
    ("body", "status"),
    [("[" * 30_000, 400), ('{"a":' * 10_000, 400), ("x" * 100_000, 413)],
    ids=["nested lists", "nested objects", "too large"],
)
def test_deeply_nested_or_large_request_is_refused(
    folder: Path, body: str, status: int
) -> None:
    # Python's JSON parser exceeds the recursion limit on deep nesting.
    strike = RecordingStrike()
    headers = AUTHORISED | {"Content-Type": "application/json"}
    response = make_client(folder, strike).post("/strike", data=body, headers=headers)
    assert response.status_code == status
    assert strike.faults == []


@pytest.mark.parametrize(
    "fault",
    [[1], "kill", {"degrade": {"device": "source", "rate": "1" * 10_000}}],
    ids=["list", "text", "long value"],
)
def test_invalid_fault_is_refused_with_short_message(
    folder: Path, fault: object
) -> None:
    def strike(fault: Mapping[str, object]) -> str:
        return str(parse(ActionPart, dict(fault)))

    client = make_client(folder, strike)
    response = client.post("/strike", json=fault, headers=AUTHORISED)
    assert response.status_code == 400
    assert len(response.data) < 5000
