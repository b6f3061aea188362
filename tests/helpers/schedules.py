"""Random schedules of faults for asynchronous pipelines: several at once, in recoveries, on whatever device."""

import random

DEVICES = ("source", "worker1", "worker2", "worker3")
WORKERS = DEVICES[1:]
STEPS = 36
METHOD = {
    "name": "ftpipehd",
    "aggregation_interval": 0,
    "chain_replication_interval": 4,
    "global_replication_interval": 8,
    "repartition_first": 5,
    "repartition_every": 10,
    "profile_runs": 1,
    "stall_timeout": "500ms",
    "min_improvement": 0,
    "resume": "last-replica",
}
"""Options under which a run's weights follow from its stretches alone; test_next_batch.py covers the default."""
MODEL = {"name": "mlp", "hidden": [24] * 6}
"""Units that can be shared out, so that there is something to adapt."""


def at_span_start(device, span, batch):
    return {"device": device, "begins": span, "batch": batch}


def random_fault(draw: random.Random, first: bool) -> dict:
    kind = draw.choice(
        ["kill", "kill", "pause", "partition", "degrade", "throttle", "central", "cut"]
    )
    lasting = draw.choice(["300ms", "1s", "3s", "8s", None])
    victim = draw.choice(WORKERS)
    if kind == "partition":
        fault = {"partition": [sorted(draw.sample(DEVICES, draw.randint(1, 2)))]}
    elif kind == "degrade":
        fault = {
            "degrade": {
                "device": victim,
                "rate": draw.choice(["8kbit", "200kbit"]),
                "delay": "100ms",
            }
        }
    elif kind == "throttle":
        fault = {
            "throttle": {
                "device": draw.choice(DEVICES),
                "slowdown": draw.choice([2, 10, 100]),
            }
        }
    elif kind == "cut":
        one, other = draw.sample(DEVICES, 2)
        ends = draw.choice([{"between": [one, other]}, {"from": one, "to": other}])
        fault = {
            "flap": {**ends, "down": draw.choice(["200ms", "2s", "10h"]), "up": "500ms"}
        }
        lasting = lasting or draw.choice(["30s", None])
    elif kind == "central":
        fault = {draw.choice(["kill", "pause"]): "source"}
        lasting = lasting or "2s"
    else:
        fault = {kind: victim}
    if lasting:
        fault["for"] = lasting
    moments = [{"at": f"{draw.randint(0, 2500)}ms"}]
    span = draw.choice(["forward", "backward", "update"])
    moments.append(
        {
            "when": {
                "device": victim,
                "begins": span,
                "batch": draw.randint(0, STEPS - 1),
            }
        }
    )
    moments.append(
        {
            "when": {
                "device": victim,
                "begins": draw.choice(["replicate", "keep", "load"]),
            }
        }
    )
    if not first:
        moments.append({"after": f"{draw.choice([1, 200, 2000, 6000])}ms"})
        moments.append(
            {
                "when": {
                    "device": "source",
                    "event": draw.choice(["recovery", "stretch", "repartition"]),
                }
            }
        )
    return fault | draw.choice(moments)


def random_keys(seed: int) -> dict:
    """Return the keys of a scenario, for `runs.scenario` and `runs.written`."""
    draw = random.Random(seed)
    faults = [random_fault(draw, index == 0) for index in range(draw.randint(1, 5))]
    name = draw.choice(["ftpipehd", "ftpipehd", "respipe", "pipedream"])
    given = {
        "name": name,
        "chain_replication_interval": 4,
        "global_replication_interval": 8,
        "stall_timeout": "500ms",
    }
    method = METHOD if name == "ftpipehd" else given
    window = draw.choice(["0s", "5s"])
    devices = {
        name: {"speed": draw.choice(["2mflops", "1mflops", "200kflops"])}
        for name in DEVICES
    }
    return {
        "workload": {"steps": STEPS, "model": MODEL},
        "method": {**method, "rejoin_timeout": window},
        "devices": devices,
        "faults": faults,
        "time_limit": "30000s",
    }
