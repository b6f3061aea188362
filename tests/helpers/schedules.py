"""Random fault schedules for asynchronous pipelines: concurrent faults, also in recoveries, on any device."""

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
"""Options with which the stretches of a run determine its weights; test_next_batch.py covers the default `resume`."""
MODEL = {"name": "mlp", "hidden": [24] * 6}
"""Enough units for the method to move some between stages."""


def at_span_start(device, span, batch):
    return {"device": device, "begins": span, "batch": batch}


def random_fault(draw: random.Random, *, is_first: bool) -> dict:
    """Return the keys of a fault: ``central`` hits the coordinator, ``cut`` one link, most others a worker."""
    # Tests name the seeds of former failures, which stay valid only as long as the order of draws stays. Kills are the
    # most important kind, and twice as likely as each other kind.
    kind = draw.choice(
        ["kill", "kill", "pause", "partition", "degrade", "throttle", "central", "cut"]
    )
    duration = draw.choice(["300ms", "1s", "3s", "8s", None])
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
        first_end, second_end = draw.sample(DEVICES, 2)
        both_ways = {"between": [first_end, second_end]}
        one_way = {"from": first_end, "to": second_end}
        ends = draw.choice([both_ways, one_way])
        fault = {
            "flap": {**ends, "down": draw.choice(["200ms", "2s", "10h"]), "up": "500ms"}
        }
        duration = duration or draw.choice(["30s", None])
    elif kind == "central":
        fault = {draw.choice(["kill", "pause"]): "source"}
        # No method survives the loss of the coordinator, so it always returns.
        duration = duration or "2s"
    else:
        fault = {kind: victim}
    if duration:
        fault["for"] = duration
    return fault | random_moment(draw, victim, is_first=is_first)


def random_moment(draw: random.Random, victim: str, *, is_first: bool) -> dict:
    """Return the keys for the time of a fault; all faults but the first may also depend on an earlier fault."""
    moments = [{"at": f"{draw.randint(0, 2500)}ms"}]
    span = draw.choice(["forward", "backward", "update"])
    moments.append({"when": at_span_start(victim, span, draw.randint(0, STEPS - 1))})
    rare_span = draw.choice(["replicate", "keep", "load"])
    moments.append({"when": {"device": victim, "begins": rare_span}})
    if not is_first:
        moments.append({"after": f"{draw.choice([1, 200, 2000, 6000])}ms"})
        event = draw.choice(["recovery", "stretch", "repartition"])
        moments.append({"when": {"device": "source", "event": event}})
    return draw.choice(moments)


def random_keys(seed: int) -> dict:
    """Return the keys of a random scenario for `runs.make_scenario` and `runs.scenario_keys`."""
    draw = random.Random(seed)
    faults = [
        random_fault(draw, is_first=index == 0) for index in range(draw.randint(1, 5))
    ]
    name = draw.choice(["ftpipehd", "ftpipehd", "respipe", "pipedream"])
    # The other methods lack the options of `METHOD` for repartitioning.
    replicated = {
        "name": name,
        "chain_replication_interval": 4,
        "global_replication_interval": 8,
        "stall_timeout": "500ms",
    }
    method = METHOD if name == "ftpipehd" else replicated
    rejoin_timeout = draw.choice(["0s", "5s"])
    devices = {
        name: {"speed": draw.choice(["2mflops", "1mflops", "200kflops"])}
        for name in DEVICES
    }
    return {
        "workload": {"steps": STEPS, "model": MODEL},
        "method": {**method, "rejoin_timeout": rejoin_timeout},
        "devices": devices,
        "faults": faults,
        "time_limit": "30000s",
    }
