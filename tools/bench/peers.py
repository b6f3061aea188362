"""Comparison with other simulators, the peers: Flower for the same training, and SimPy for the same queues.

The packages of the peers are installed into a separate environment, ``.build/peers``, which can import torch and
scikit-learn from this one. "Ours" is the testbed's.
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
from tools.bench.measurement import Measurement

HOME = ROOT / ".build/peers"
"""Folder of the peers' Python environment."""
PACKAGES = ("flwr[simulation]", "simpy")
"""Packages of other tools, in their newest versions."""
CLIENTS = {100: 10, 1000: 3}
"""Number of clients -> rounds; all clients take part in each round."""
HIDDEN, BATCH, RATE = 64, 32, 0.2
"""Hidden values of the perceptron, samples in a batch, and learning rate."""


def measure() -> Iterator[Measurement]:
    """Yield processor time, time, memory and accuracy of both; ratios are ours over theirs."""
    queues = _run_peer("simpy", {})
    ours = _run_peer("ours", {})
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
        flower = _run_peer("flower", training)
        ours = _simulate_training(training)
        run = f"of {clients} clients, {rounds} rounds"
        for name, result, detail in (
            ("Flower", flower, flower["version"]),
            ("ours, with links and report", ours, ""),
        ):
            yield Measurement(
                f"processor time {run}, {name}", result["processor"], "s", detail=detail
            )
            yield Measurement(f"time {run}, {name}", result["seconds"], "s")
            yield Measurement(f"memory {run}, {name}", result["bytes"] / 1e6, "MB")
            yield Measurement(f"accuracy {run}, {name}", result["accuracy"], "")
        for cost in ("processor", "seconds", "bytes"):
            ratio = ours[cost] / flower[cost]
            yield Measurement(f"{cost} {run}, ours over Flower", ratio, "x", 1.0)


def _run_peer(part: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run a part of ``peers_program`` in the environment of the peers; return the result with the costs."""
    python = HOME / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True
        )
        # A .pth file adds this environment behind the packages of the peers, which may need other versions.
        prefix = {"base": str(HOME), "platbase": str(HOME)}
        site_packages = Path(sysconfig.get_path("purelib", vars=prefix))
        (site_packages / "testbed.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(python), "-m", "tools.bench.peers_program"]
    return _run_timed([*command, part, json.dumps(arguments)])


def _simulate_training(training: Mapping[str, Any]) -> dict[str, Any]:
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
            # A client with few samples trains them as one batch, in Flower as well.
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
        result = _run_timed([*command, "--out", str(out)], has_output=False)
        metrics = json.loads((out / "metrics.json").read_text())
        result["accuracy"] = metrics["accuracy"]
    return result


def _run_timed(command: list[str], *, has_output: bool = True) -> dict[str, Any]:
    """Run a command; return the JSON object in the last line of output, and the costs of all processes.

    The costs are seconds, processor time and memory. Without ``has_output``, only the costs are returned.
    """
    environment = {
        **os.environ,
        # The environment of the peers has no package of this checkout.
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
    # The last line is that of `watch`, the line before that of the command.
    lines = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    if has_output:
        result = json.loads(lines[-2]) | result
    return result
