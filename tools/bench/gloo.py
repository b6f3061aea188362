"""Our pipeline beside torch's own over gloo: the same model, cuts, devices and links; links decide, not computing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import docker

from testbed.common.errors import TestbedError
from testbed.ml.data import load as load_data
from testbed.ml.preparation import part_of
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
from tools.bench.figure import Measurement

SCHEDULES = ("1f1b", "gpipe")
DEVICES = 4
INPUTS, CLASSES = 64, 10
"""Sizes of the data set digits."""
HIDDEN = (8, 512, 8, 512, 8, 512, 8)
"""512 values a sample cross each cut, as in a perceptron of seven times 512. Layers of 8 between them make computing
so light that no host of few cores is late, which would be the host's time and not the transport's."""
BATCH = 256
MICRO_BATCHES = 4
WARM_UP = 3
"""Steps left out at the beginning: connections are made and their windows open."""
STEPS = 10
SHARE = 0.8
"""Share of gloo's time that ours may take."""
BESIDE = 0.25
"""Share of the processor time of torch's own pipelining that all of ours may take which does not compute."""
AWAY = 0.05
"""Share of the plan by which ours may differ from it."""
PORT = 29500
_TAIL = 2000
"""Characters of a failed program's output that are shown."""


def scenario(schedule: str) -> Scenario:
    """Return the comparison's scenario by one of our schedules, two layers a device."""
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
                    # The optimal cuts would leave devices out: links, and not computing, take the time.
                    "partition": "even",
                },
                "batch_size": BATCH,
                "steps": WARM_UP + STEPS,
            },
        }
    )


@dataclass(frozen=True)
class GlooTimes:
    """What torch's pipelining over gloo takes, in seconds."""

    step: float
    """Median of the first stage's steps."""
    processor: float
    """Processor time of all stages in all steps."""


def jobs(plan: Plan, schedule: str) -> dict[str, dict[str, Any]]:
    """Return what each device's gloo program is given: the plan's cuts, a rank for each stage."""
    common = {
        "world": len(plan.pieces),
        "schedule": schedule,
        "widths": [INPUTS, *HIDDEN, CLASSES],
        "batch": BATCH,
        "micro_batches": MICRO_BATCHES,
        "steps": WARM_UP + STEPS,
    }
    return {
        piece.device: {"rank": rank, "first": piece.first, "last": piece.last, **common}
        for rank, piece in enumerate(plan.pieces)
    }


def _execute(
    client: docker.DockerClient,
    device: DeviceContainer,
    first: str,
    job: Mapping[str, Any],
) -> dict[str, Any]:
    """Run the program in a device's container and return what its steps took."""
    program = Path(gloo_program.__file__).read_text()
    environment = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    command = ["python3", "-c", program, json.dumps(job)]
    started = client.api.exec_create(device.id, command, environment=environment)["Id"]
    output, errors = (
        part or b"" for part in client.api.exec_start(started, demux=True)
    )
    if client.api.exec_inspect(started)["ExitCode"] != 0:
        said = (output + errors).decode(errors="replace")[-_TAIL:]
        raise TestbedError(
            f"torch's pipelining failed on {device.name}: {said.strip()}"
        )
    took: dict[str, Any] = json.loads(output)
    return took


def gloo_times(lab: Lab, plan: Plan, schedule: str) -> GlooTimes:
    """Return what torch's pipelining takes, without the steps to warm up."""
    work = jobs(plan, schedule)
    leader = lab.devices[plan.coordinator]
    client = connect()
    with ThreadPoolExecutor(len(work)) as pool:
        running = {
            name: pool.submit(_execute, client, lab.devices[name], leader.address, job)
            for name, job in work.items()
        }
    took = {name: future.result() for name, future in running.items()}
    return GlooTimes(
        median(took[plan.coordinator]["seconds"][WARM_UP:]),
        sum(each["processor"] for each in took.values()),
    )


def our_times(steps: Sequence[Step]) -> list[float]:
    """Return the seconds of our undisturbed steps of whole batches, without those to warm up."""
    return [step.seconds for step in steps if step.steady and step.step >= WARM_UP]


def judge(
    schedule: str, ours: float, gloo: float, planned: float, host: HostTime
) -> Iterator[Measurement]:
    """Yield the three step times, in seconds, and their ratios; ``host`` is what the host added to our steps."""
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
    yield Measurement(f"{step}, ours to gloo's", ours / gloo, "x", SHARE)
    own = abs(ours * (1 - host.share) / planned - 1)
    yield Measurement(
        f"{step}, ours without what the host added, away from the plan", own, ""
    )
    yield Measurement(
        f"{step}, ours away from the plan", abs(ours / planned - 1), "", AWAY
    )


def beside(
    schedule: str, ours: Mapping[str, float], gloo: float
) -> Iterator[Measurement]:
    """Yield what a run takes of the processors; ``ours`` as `processor_time` has it, ``gloo`` in seconds."""
    run, taken = (
        f"{WARM_UP + STEPS} steps by {schedule}",
        sum(ours.values()) - ours["computing"],
    )
    detail = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ours.items())
    yield Measurement(
        f"{run}, processor time of torch's pipelining over gloo", gloo, "s"
    )
    yield Measurement(
        f"{run}, processor time of ours but for computing", taken, "s", detail=detail
    )
    yield Measurement(
        f"{run}, processor time of ours but for computing to torch's",
        taken / gloo,
        "x",
        BESIDE,
    )


def with_gloo(prepared: Mapping[str, Prepared]) -> dict[str, GlooTimes]:
    """Return what each schedule takes over gloo, all on one lab."""
    lab = Lab.create(next(iter(prepared.values())).trial)
    try:
        return {
            schedule: gloo_times(lab, each.plan, schedule)
            for schedule, each in prepared.items()
        }
    finally:
        lab.down()


def measure() -> Iterator[Measurement]:
    """Yield for each schedule a step over gloo, with ours and by the plan, their ratios, and processor time."""
    prepared = {
        schedule: prepare(trials(scenario(schedule))[0]) for schedule in SCHEDULES
    }
    gloo = with_gloo(prepared)
    for schedule, each in prepared.items():
        outcome = emulate(
            each, load_data(part_of(each.scenario).data), accept_links=True
        )
        record = RunView(outcome, each.experiment, each.plan)
        assert each.plan.step_time is not None
        theirs = gloo[schedule]
        yield from judge(
            schedule,
            median(our_times(record.steps)),
            theirs.step,
            each.plan.step_time,
            added_time(record),
        )
        if taken := processor_time(record):
            yield from beside(schedule, taken, theirs.processor)
