"""Beside others: Flower's simulation of the same training, and the simulator's queues as a SimPy model.

They are installed into an environment of their own, ``.build/peers``, which sees this one's torch and scikit-learn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testbed_controller.lab.paths import ROOT
from tools.bench.figure import Measurement

HOME = ROOT / ".build/peers"
PACKAGES = ("flwr[simulation]", "simpy")
CLIENTS = {100: 10, 1000: 3}
"""Rounds by the number of clients, which all take part in each."""
HIDDEN, BATCH, RATE = 64, 32, 0.2


def measure() -> Iterator[Measurement]:
    """Yield processor seconds, seconds, megabytes and accuracy of both; ratios are ours over theirs."""
    queues = _told("simpy", {})
    ours = _told("ours", {})
    yield Measurement(
        "messages between 1,000 devices, SimPy",
        queues["rate"],
        "messages/s",
        detail=queues["version"],
    )
    yield Measurement(
        "messages between 1,000 devices, ours", ours["rate"], "messages/s"
    )
    yield Measurement(
        "ours over SimPy", ours["rate"] / queues["rate"], "x", 1.0, at_most=False
    )
    for clients, rounds in CLIENTS.items():
        training = {
            "clients": clients,
            "rounds": rounds,
            "hidden": HIDDEN,
            "batch": BATCH,
            "rate": RATE,
        }
        flower, ours = _told("flower", training), _ours(training)
        of = f"of {clients} clients, {rounds} rounds"
        for name, found, detail in (
            ("Flower", flower, flower["version"]),
            ("ours, with links and report", ours, ""),
        ):
            yield Measurement(
                f"processor time {of}, {name}", found["processor"], "s", detail=detail
            )
            yield Measurement(f"time {of}, {name}", found["seconds"], "s")
            yield Measurement(f"memory {of}, {name}", found["bytes"] / 1e6, "MB")
            yield Measurement(f"accuracy {of}, {name}", found["accuracy"], "")
        for what in ("processor", "seconds", "bytes"):
            yield Measurement(
                f"{what} {of}, ours over Flower", ours[what] / flower[what], "x", 1.0
            )


def _told(part: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a part of ``peers_program`` in the environment of others; return what it says, with what it took."""
    python = HOME / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True
        )
        # After the environment's own packages, of which some have other versions here.
        own = Path(
            sysconfig.get_path(
                "purelib", vars={"base": str(HOME), "platbase": str(HOME)}
            )
        )
        (own / "testbed.pth").write_text(sysconfig.get_path("purelib"))
    return _timed(
        [str(python), "-m", "tools.bench.peers_program", part, json.dumps(given)]
    )


def _ours(training: Mapping[str, Any]) -> dict[str, Any]:
    tree = {
        "name": "peers",
        "devices": {
            "server": {"profile": "laptop"},
            "client": {"profile": "raspberry-pi-4b", "count": training["clients"]},
        },
        "network": {"topology": "star", "link": {"rate": "50mbit", "delay": "5ms"}},
        "workload": {
            "model": {"name": "mlp", "hidden": [training["hidden"]]},
            "data": {"name": "digits", "split": "iid"},
            "initialisation": "torch",
            "method": {"name": "federated"},
            "training": {"optimizer": {"learning_rate": training["rate"]}},
            "batch_size": min(training["batch"], 1437 // training["clients"]),
            "epochs": training["rounds"],
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "peers.json"), Path(folder, "out")
        file.write_text(json.dumps(tree))
        command = [
            str(Path(sys.executable).with_name("testbed")),
            "run",
            str(file),
            "--runtime",
            "simulate",
        ]
        found = _timed([*command, "--out", str(out)], output=False)
        found["accuracy"] = json.loads((out / "metrics.json").read_text())["accuracy"]
    return found


def _timed(command: list[str], output: bool = True) -> dict[str, Any]:
    """Run a command; return its last line as JSON, with seconds, processor seconds and bytes of it and its children."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    watched = [
        sys.executable,
        "-m",
        "tools.bench.peers_program",
        "watch",
        json.dumps(command),
    ]
    done = subprocess.run(
        watched,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *_, said, took = (
        done.stdout.splitlines() if output else ("{}", done.stdout.splitlines()[-1])
    )
    found: dict[str, Any] = json.loads(said) | json.loads(took)
    return found
