"""The start of a run: devices that start late are awaited, and imports precede the first message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import testbed

SCENARIO: dict[str, Any] = {
    "name": "start",
    "workload": {
        "task": "generate",
        "model": {"preset": "tinystories-260k"},
        "prompts": ["hello"],
        "tokens": 4,
        "method": {"name": "sequential", "partition": "even"},
    },
    "devices": {"pi": {"count": 3, "profile": "raspberry-pi-4b"}},
    "network": {"topology": "mesh", "link": {"rate": "100mbit", "delay": "5ms"}},
}


def test_device_that_starts_seconds_late_keeps_its_layers() -> None:
    # Longer than the failure timeout of 0.5 s, and shorter than the 10 s until all stages must hold their layers.
    late = {"pause": "pi3", "at": "0s", "for": "4s"}
    run = testbed.simulate(testbed.build(**SCENARIO, faults=[late])).run
    assert run.metrics["recoveries"] == 0
    computing_devices = set()
    for event in run.outcome.events:
        if event.event == "compute":
            computing_devices.add(event.device)
    assert "pi3" in computing_devices


def test_device_that_never_answers_is_excluded() -> None:
    dead = {"kill": "pi3", "at": "0s"}
    run = testbed.simulate(testbed.build(**SCENARIO, faults=[dead])).run
    # All tokens are generated, on the other two devices.
    assert run.metrics["tokens"] == 4


PRINT_LATE_IMPORTS = """
import sys
import testbed
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_generation.workload import Generate

for method in METHODS:
    keys = SCENARIO
    keys["workload"]["method"] = {"name": method}
    scenario = testbed.build(**keys)
    Generate().prepare_device(prepare(trials(scenario)[0]).problem)
    before = set(sys.modules)
    testbed.simulate(scenario)
    # A device that imports a large module during the run does not answer pings meanwhile, and counts as lost.
    for name in set(sys.modules) - before:
        if name == "torch" or name.startswith("testbed_generation"):
            print(name)
"""


def test_programs_import_no_module_after_start(
    tmp_path: Path,
) -> None:
    methods = ("sequential", "ring", "petals", "tensor-parallel")
    program = f"METHODS = {methods}\nSCENARIO = {SCENARIO}\n{PRINT_LATE_IMPORTS}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == ""


PRINT_EVENTS = """
import testbed

SCENARIO["workload"]["method"]["heartbeat"] = "10ms"
run = testbed.simulate(testbed.build(**SCENARIO)).run
for event in run.outcome.events:
    print(event)
"""


def test_events_do_not_depend_on_order_of_sets() -> None:
    outputs = []
    # The order of a set of strings depends on this seed.
    for hash_seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", f"SCENARIO = {SCENARIO}\n{PRINT_EVENTS}"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        outputs.append(run.stdout)
    # Pings are sent to several devices at once, so their order is the most likely to change.
    assert "ping" in outputs[0]
    assert outputs[0] == outputs[1]
