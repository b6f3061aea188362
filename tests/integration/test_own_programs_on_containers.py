"""Users' programs in containers: images, names of devices, events from output lines, and the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed_controller.api import build, emulate, load
from testbed_controller.lab import images
from tests.helpers import ROOT

# The images of the examples may have to be built first, which no time limit of a scenario covers.
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


def test_programs_reach_each_other_by_device_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text(CLIENT)
    server = {
        "command": "python3 -m http.server 9000",
        "files": ["client.py"],
        "background": True,
    }
    # The base image is Debian with Python and contains nothing of the testbed.
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
    lines = [
        row["text"]
        for row in run.rows("events")
        if row["event"] == "output" and row["device"] == "client"
    ]
    # The first line contains the addresses of both devices, and the client's address for other destinations.
    subnets = {address.rpartition(".")[0] for address in lines[0].split()}
    assert len(subnets) == 1
    (request,) = run.rows("requests")
    # Two round trips over 10 ms: one for the connection, one for the response.
    assert request["latency"] >= 0.04


EXAMPLES = ROOT / "scenarios" / "examples"


@pytest.mark.parametrize(
    ("name", "changes", "metric", "minimum"),
    [
        # A step passes two links of 5 ms forward and backward.
        ("programs", {}, "step_time", 0.02),
        # A round sends a model of 1.2 MB at 20 Mbit/s to each client and back.
        (
            "flower",
            {"workload.programs.server.command": "python3 flower.py server 3"},
            "round_time",
            0.97,
        ),
    ],
)
def test_shipped_examples_are_not_faster_than_their_links(
    tmp_path: Path, name: str, changes: dict[str, str], metric: str, minimum: float
) -> None:
    scenario = load(EXAMPLES / f"{name}.yaml", {**changes, "expect": {}})
    run = emulate(scenario, tmp_path / "out", accept_links=True)
    assert run.run.outcome.status == "finished", run.run.outcome.error
    assert run.metrics[metric] >= minimum
    assert run.metrics["wire_bytes"] > 0
