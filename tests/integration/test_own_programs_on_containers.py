"""Programs of the user's on containers: any image, names are the shaped network, lines are events, a status decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed_controller.api import build, emulate, load
from testbed_controller.lab import images
from tests.helpers import ROOT

# More than a scenario's own limit of time, for an image whose packages are installed first.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

CLIENT = """
import json, os, socket, sys, time, urllib.request
away = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
away.connect(("192.0.2.1", 1))
print(socket.gethostbyname("server"), socket.gethostbyname("client"), away.getsockname()[0])
for attempt in range(100):
    try:
        began = time.perf_counter()
        text = urllib.request.urlopen("http://server:9000/client.py").read()
        break
    except OSError:
        time.sleep(0.1)
assert text == open("client.py", "rb").read() and "TESTBED_TOKEN" not in os.environ
print(json.dumps({"event": "request", "request": 0, "latency": time.perf_counter() - began}))
print("on purpose", file=sys.stderr)
sys.exit(3)
"""


def test_a_server_and_a_client_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text(CLIENT)
    server = {
        "command": "python3 -m http.server 9000",
        "files": ["client.py"],
        "background": True,
    }
    # Of which nothing is ours: Debian with Python alone.
    client = {
        "command": "python3 client.py",
        "files": ["client.py"],
        "image": images.image_tags().base,
    }
    scenario = build(
        name="own-programs",
        devices={"server": {"memory": "400MiB"}, "client": {"memory": "96MiB"}},
        network={"link": {"rate": "50mbit", "delay": "10ms"}},
        workload={"task": "program", "programs": {"server": server, "client": client}},
        time_limit="60s",
    )
    run = emulate(scenario, "out", accept_links=True)
    outcome = run.run.outcome
    assert outcome.status == "failed"
    assert "python3 client.py ended with status 3: on purpose" in (outcome.error or "")
    assert "on purpose" in Path("out", "logs", "client.log").read_text()
    assert "attaching" in Path("out", "logs", "shaper.log").read_text()
    said = [
        row["text"]
        for row in run.rows("events")
        if row["event"] == "output" and row["device"] == "client"
    ]
    subnet = {address.rpartition(".")[0] for address in said[0].split()}
    assert len(subnet) == 1  # both on the data network, and on the way to anywhere else
    (request,) = run.rows("requests")
    assert (
        request["latency"] >= 0.04
    )  # there and back, twice: a connection, then an answer


EXAMPLES = ROOT / "scenarios" / "examples"


@pytest.mark.parametrize(
    ("name", "changes", "figure", "least"),
    [
        # Forward over two links of 5 ms, and back.
        ("programs", {}, "step_time", 0.02),
        # A model to each client and back: 1.2 MB at 20 Mbit/s, twice.
        (
            "flower",
            {"workload.programs.server.command": "python3 flower.py server 3"},
            "round_time",
            0.97,
        ),
    ],
)
def test_what_is_shipped_runs_no_faster_than_its_links(
    tmp_path: Path, name: str, changes: dict[str, str], figure: str, least: float
) -> None:
    scenario = load(EXAMPLES / f"{name}.yaml", {**changes, "expect": {}})
    run = emulate(scenario, tmp_path / "out", accept_links=True)
    assert run.run.outcome.status == "finished", run.run.outcome.error
    assert run.metrics[figure] >= least
    assert run.metrics["wire_bytes"] > 0
