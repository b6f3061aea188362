"""Comparison of the testbed's pipeline with torch's own pipelining over gloo.

Both have the same model, cuts, devices and links, whose rate limits the step time. "Ours" is the testbed's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import docker

from testbed.common.errors import TestbedError
from testbed.ml.data import load as load_data
from testbed.ml.preparation import workload_section
from testbed.plan import Plan
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.trace.host import HostTime, added_time, processor_time
from testbed.trace.record import RunView, Step
from testbed_controller.lab.containers import DeviceContainer
from testbed_controller.lab.engine import connect
from testbed_controller.lab.lab import Lab
from testbed_controller.running.emulation import emulate
from testbed_controller.shaping.registry import INTERFACE
from tools.bench import gloo_program
from tools.bench.measurement import Measurement

SCHEDULES = ("1f1b", "gpipe")
DEVICES = 4
INPUTS, CLASSES = 64, 10
"""Sizes of the data set digits."""
HIDDEN = (8, 512, 8, 512, 8, 512, 8)
"""Each cut transfers 512 values per sample, as in a perceptron of seven layers of 512. The layers of 8 between them
keep computation so light that a host with few cores is never late, and only the transport is measured."""
BATCH = 256
"""Samples in a step."""
MICRO_BATCHES = 4
WARM_UP = 3
"""Steps not measured at the beginning, while connections are established and their windows open."""
STEPS = 10
"""Measured steps, after the warm-up."""
MOST_STEP_RATIO = 0.8
"""Maximum ratio of our step time to gloo's step time."""
MOST_PROCESSOR_RATIO = 0.25
"""Maximum ratio of our processor time without computation to the processor time of torch's pipelining."""
MOST_DEVIATION = 0.05
"""Maximum relative difference of our step time from the plan."""
PORT = 29500
"""Port at which the stages join the process group."""
_TAIL = 2000
"""Number of characters shown of a failed program's output."""


def make_scenario(schedule: str) -> Scenario:
    """Return the scenario of the comparison for a schedule, with two layers per device."""
    return Scenario.model_validate(
        {
            "name": "bench-gloo",
            "devices": {"device": {"count": DEVICES, "speed": "40gflops"}},
            "network": {"link": {"rate": "50mbit", "delay": "5ms"}},
            "workload": {
                "task": "train",
                "model": {"name": "mlp", "hidden": list(HIDDEN)},
                "data": {"name": "digits"},
                "method": {
                    "name": "pipeline",
                    "schedule": schedule,
                    "micro_batches": MICRO_BATCHES,
                    # The optimal partition would use fewer devices, as the links limit the step time.
                    "partition": "even",
                },
                "batch_size": BATCH,
                "steps": WARM_UP + STEPS,
            },
        }
    )


@dataclass(frozen=True)
class GlooTimes:
    """Times of torch's pipelining over gloo, in seconds."""

    step: float
    """Median of the first stage's steps after the warm-up."""
    processor: float
    """Processor time of all stages in all steps, including the warm-up."""


def stage_arguments(plan: Plan, schedule: str) -> dict[str, dict[str, Any]]:
    """Return the argument of the gloo program for each device: the cuts of the plan, with a rank per stage."""
    common = {
        "world": len(plan.assignments),
        "schedule": schedule,
        "widths": [INPUTS, *HIDDEN, CLASSES],
        "batch": BATCH,
        "micro_batches": MICRO_BATCHES,
        "steps": WARM_UP + STEPS,
    }
    arguments = {}
    for rank, assignment in enumerate(plan.assignments):
        stage = {"rank": rank, "start": assignment.start, "stop": assignment.stop}
        arguments[assignment.device] = {**stage, **common}
    return arguments


def _run_program(
    client: docker.DockerClient,
    device: DeviceContainer,
    first: str,
    job: Mapping[str, Any],
) -> dict[str, Any]:
    """Run the gloo program in the container of a device and return the measured times."""
    program = Path(gloo_program.__file__).read_text()
    environment = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        # The shaped interface; gloo would choose an address by the name of the host.
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # One thread, as a device has one processor.
        "OMP_NUM_THREADS": "1",
    }
    command = ["python3", "-c", program, json.dumps(job)]
    created = client.api.exec_create(device.id, command, environment=environment)
    execution = created["Id"]
    output, errors = client.api.exec_start(execution, demux=True)
    exit_code = client.api.exec_inspect(execution)["ExitCode"]
    if exit_code != 0 or not output:
        # docker returns None for a stream without output.
        text = ((output or b"") + (errors or b"")).decode(errors="replace")
        end = text[-_TAIL:].strip() or "the program printed nothing"
        raise TestbedError(f"torch's pipelining failed on {device.name}: {end}")
    times: dict[str, Any] = json.loads(output)
    return times


def measure_gloo(lab: Lab, plan: Plan, schedule: str) -> GlooTimes:
    """Run torch's pipelining on a lab and return the times; the warm-up counts only for the processor time."""
    arguments = stage_arguments(plan, schedule)
    # The coordinator has the first stage.
    first_address = lab.devices[plan.coordinator].address
    running = {}
    times = {}
    # All stages at once, as each waits for the others to join the process group.
    with closing(connect()) as client, ThreadPoolExecutor(len(arguments)) as pool:
        for name, job in arguments.items():
            device = lab.devices[name]
            future = pool.submit(_run_program, client, device, first_address, job)
            running[future] = name
        # The first failure is the cause; stages that fail later have lost a connection.
        for future in as_completed(running):
            times[running[future]] = future.result()
    step = median(times[plan.coordinator]["seconds"][WARM_UP:])
    processor = sum(each["processor"] for each in times.values())
    return GlooTimes(step, processor)


def steady_step_times(steps: Sequence[Step]) -> list[float]:
    """Return the times of our undisturbed steps after the warm-up, in seconds."""
    return [step.seconds for step in steps if step.steady and step.step >= WARM_UP]


def compare_step_times(
    schedule: str, ours: float, gloo: float, planned: float, host: HostTime
) -> Iterator[Measurement]:
    """Yield the three step times in seconds and their ratios; ``host`` has the time that a slow host added."""
    step = f"step by {schedule}"
    late = host.computing / host.seconds
    detail = f"of this the host added {host.share:.1%}: {late:.1%} by computing late, the rest by late messages"
    yield Measurement(f"{step}, torch's pipelining over gloo", gloo, "s")
    yield Measurement(f"{step}, ours", ours, "s", detail=detail)
    yield Measurement(f"{step}, the plan's", planned, "s")
    yield Measurement(
        f"{step}, the plan's to gloo's",
        planned / gloo,
        "x",
        detail="the least that ours could reach",
    )
    yield Measurement(f"{step}, ours to gloo's", ours / gloo, "x", MOST_STEP_RATIO)
    # The plan does not include the time that a slow host adds, so this time is subtracted from ours.
    own_deviation = abs(ours * (1 - host.share) / planned - 1)
    name = f"{step}, ours without what the host added, away from the plan"
    yield Measurement(name, own_deviation, "")
    deviation = abs(ours / planned - 1)
    yield Measurement(f"{step}, ours away from the plan", deviation, "", MOST_DEVIATION)


def compare_processor_time(
    schedule: str, ours: Mapping[str, float], gloo: float
) -> Iterator[Measurement]:
    """Yield processor times in seconds, and their ratio.

    ``ours`` is the result of `processor_time`; ``gloo`` is the processor time of all stages.
    """
    run = f"{WARM_UP + STEPS} steps by {schedule}"
    overhead = sum(ours.values()) - ours["computing"]
    detail = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ours.items())
    yield Measurement(
        f"{run}, processor time of torch's pipelining over gloo", gloo, "s"
    )
    yield Measurement(
        f"{run}, processor time of ours but for computing",
        overhead,
        "s",
        detail=detail,
    )
    yield Measurement(
        f"{run}, processor time of ours but for computing to torch's",
        overhead / gloo,
        "x",
        MOST_PROCESSOR_RATIO,
    )


def measure_schedules(prepared: Mapping[str, Prepared]) -> dict[str, GlooTimes]:
    """Return the times of each schedule over gloo, all on one lab."""
    first = next(iter(prepared.values()))
    lab = Lab.create(first.trial)
    times = {}
    try:
        for schedule, each in prepared.items():
            times[schedule] = measure_gloo(lab, each.plan, schedule)
    finally:
        lab.down()
    return times


def measure() -> Iterator[Measurement]:
    """Yield for each schedule the step time over gloo, of ours and of the plan, their ratios, and processor time."""
    prepared = {}
    for schedule in SCHEDULES:
        prepared[schedule] = prepare(trials(make_scenario(schedule))[0])
    gloo = measure_schedules(prepared)
    for schedule, each in prepared.items():
        dataset = load_data(workload_section(each.scenario).data)
        outcome = emulate(each, dataset, accept_links=True)
        record = RunView(outcome, each.experiment, each.plan)
        assert each.plan.step_time is not None
        theirs = gloo[schedule]
        yield from compare_step_times(
            schedule,
            median(steady_step_times(record.steps)),
            theirs.step,
            each.plan.step_time,
            added_time(record),
        )
        taken = processor_time(record)
        assert taken is not None, "runs in containers measure processor time"
        yield from compare_processor_time(schedule, taken, theirs.processor)
