"""Random scenarios with any method, options, topology, links and faults that a scenario file can describe.

A scenario is a function of its seed. Every fault is reverted after a while, so a run that does not end has a bug.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Tree = dict[str, Any]
"""A scenario as the tree of values in its file."""

# Values of options of several methods. None leaves an option out.
TIMEOUTS: Mapping[str, Sequence[Any]] = {
    "stall_timeout": ["200ms", "500ms", "2s"],
    "rejoin_timeout": ["3s", "5s", "15s"],
}
PIPELINE: Mapping[str, Sequence[Any]] = {
    **TIMEOUTS,
    "evaluate_every": [1, 5, None],
}
ASYNCHRONOUS: Mapping[str, Sequence[Any]] = {
    **PIPELINE,
    "in_flight": [1, 2, 3, None],
    "vertical_sync": [True, False],
    "aggregation_interval": [0, 1, 2],
    "chain_replication_interval": [0, 1, 3],
    "global_replication_interval": [1, 4],
    "replicas": [1, 2],
}
LOCAL_TRAINING: Mapping[str, Sequence[Any]] = {
    "local_steps": [1, 2, 4],
    "round_deadline": ["5s", "20s", None],
    "evaluate_every": [1, 3],
}
ROUNDS: Mapping[str, Sequence[Any]] = {**LOCAL_TRAINING, "min_devices": [1, 2]}
SLOTS: Mapping[str, Sequence[Any]] = {
    "allocation": ["vertical", "hybrid", "horizontal"],
    "mapping": ["random", "genetic"],
    "recovery": ["none", "r-tx", "ack"],
    "test_runs": [1, 3],
    "evaluate_every": [5, None],
    "timeslot_margin": ["10ms", "100ms"],
}
OPTIONS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "single": {},
    "pipeline": {
        **PIPELINE,
        "schedule": ["1f1b", "gpipe", "model-parallelism"],
        "partition": ["even", "optimal"],
        "recompute": [True, False],
        "checkpoint_every": [1, 4, 20],
    },
    "gpipe": {**PIPELINE, "micro_batches": [1, 2, 4], "checkpoint_every": [1, 4]},
    "model-parallelism": {**PIPELINE, "checkpoint_every": [1, 4]},
    "ftpipehd": {
        **ASYNCHRONOUS,
        "profile_runs": [1, 2],
        "repartition_first": [1, 5],
        "repartition_every": [0, 6],
    },
    "pipedream": {**ASYNCHRONOUS, "partition": ["homogeneous", "even"]},
    "respipe": {**ASYNCHRONOUS, "partition": ["homogeneous", "capacities"]},
    "federated": {**ROUNDS, "fraction": ["50%", "100%"]},
    # This method has no option `min_devices`.
    "split-learning": LOCAL_TRAINING,
    "split-federated": ROUNDS,
    "pipelearn": {**ROUNDS, "parallel_batches": [1, 2, "best"]},
    "edgepipe": {**SLOTS, "pipelined": [True, False]},
    "versatile": {
        **SLOTS,
        "substitution": [True, False],
        "reuse_gradients": [True, False],
        "rearrangement": [True, False],
    },
    "sequential": {**TIMEOUTS, "in_flight": [1, 3]},
    "distributed": {
        "scheme": ["lop", "lip", "fuse", "optimal"],
        "exchange": ["via-source", "direct"],
        "in_flight": [1, 2],
        "on_loss": ["replan", "fail"],
        "stall_timeout": ["500ms", "2s"],
    },
}
INFERENCE = ("sequential", "distributed")
COLLABORATIVE = ("federated", "split-learning", "split-federated", "pipelearn")
"""Methods whose devices own samples and train in rounds."""
SLOTTED = ("edgepipe", "versatile")
"""Methods with timeslots and lossy casts."""
SYNCHRONOUS = ("pipeline", "gpipe", "model-parallelism")
"""Methods that compute the same as the undivided model, even under faults."""
LOSSLESS = (*COLLABORATIVE, "single", *SYNCHRONOUS, "ftpipehd", "pipedream", "respipe")
"""Methods that finish every step, after any number of attempts."""

SPANS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("pipeline", "gpipe", "model-parallelism"),
        ("forward", "backward", "update", "load", "checkpoint"),
    ),
    **dict.fromkeys(
        ("respipe", "ftpipehd"),
        ("forward", "backward", "update", "load", "replicate", "keep"),
    ),
    "pipedream": ("forward", "backward", "update", "load"),
    **dict.fromkeys(INFERENCE, ("forward", "load")),
    **dict.fromkeys(SLOTTED, ("forward", "backward", "evaluate")),
}
"""Spans of a device that a fault can wait for, by method; all other methods have forward, backward and update."""
EVENTS = ("send", "receive", "begin", "compute", "memory", "state")
"""Events of a device that a fault can wait for, in inference."""
TRAINING_EVENTS = (*EVENTS, "step", "evaluate")
"""Events of a device that a fault can wait for, in training."""


def random_method(seed: int) -> str:
    """Return the method of the scenario of a seed, without drawing the rest of the scenario.

    >>> random_method(7) == random_scenario(7)["workload"]["method"]["name"]
    True
    """
    return _draw_method(random.Random(seed))


def random_scenario(seed: int) -> Tree:
    """Return the scenario of a seed."""
    draw = random.Random(seed)
    # First, as `random_method` draws nothing else.
    method = _draw_method(draw)
    names = ["source", *(f"w{number}" for number in range(draw.randint(1, 4)))]
    devices = {name: _draw_device(draw) for name in names}
    workload = _draw_workload(draw, method, len(names))
    scenario_seed = draw.randint(0, 9)
    network = _draw_network(draw, method, names)
    faults: list[Tree] = []
    # One or two faults are the most frequent.
    for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4])):
        faults.append(_draw_fault(draw, workload, names, is_first=not faults))
    return {
        "name": f"stress-{seed}",
        "seed": scenario_seed,
        "devices": devices,
        "network": network,
        "workload": workload,
        "faults": faults,
        "time_limit": "3000s",
    }


def _draw_method(draw: random.Random) -> str:
    return draw.choice(list(OPTIONS))


def _draw_workload(draw: random.Random, method: str, device_count: int) -> Tree:
    options: Tree = {"name": method}
    for name, values in OPTIONS[method].items():
        if draw.random() < 0.4:
            value = draw.choice(values)
            if value is not None:
                options[name] = value
    # A pipeline needs at least a layer per device.
    layers = draw.randint(max(2, device_count - 1), 6)
    hidden = [draw.choice([8, 12, 16, 24]) for _ in range(layers)]
    workload: Tree = {
        "model": {"name": "mlp", "hidden": hidden},
        "data": {"name": "digits", "train": 160, "test": 32},
        "method": options,
        "batch_size": draw.choice([8, 16]),
    }
    if method in INFERENCE:
        workload |= {"task": "infer", "requests": draw.randint(1, 12)}
    else:
        workload["steps"] = draw.randint(1, 16)
        momentum = draw.choice([0, 0.9])
        optimizer = {"learning_rate": 0.05, "momentum": momentum}
        workload["training"] = {"optimizer": optimizer}
    if method in COLLABORATIVE:
        splits = ["iid", {"dirichlet": 0.5}, {"shards": 3}]
        workload["data"]["split"] = draw.choice(splits)
        # Whole rounds, each of which has this number of steps.
        rounds = draw.randint(1, 6)
        workload["steps"] = options.get("local_steps", 1) * rounds
    return workload


def _draw_device(draw: random.Random) -> Tree:
    device: Tree = {"speed": draw.choice(["3mflops", "20mflops", "300mflops"])}
    if draw.random() < 0.2:
        device["uplink"] = draw.choice(["2mbit", "10mbit"])
    return device


def _draw_link(draw: random.Random) -> Tree:
    link: Tree = {
        "rate": draw.choice(["1mbit", "10mbit", "100mbit"]),
        "delay": draw.choice(["2ms", "20ms"]),
    }
    if draw.random() < 0.3:
        link["jitter"] = "1ms"
    if draw.random() < 0.3:
        link["loss"] = draw.choice(["0.1%", "2%"])
    return link


def _draw_network(draw: random.Random, method: str, names: Sequence[str]) -> Tree:
    network: Tree = {"link": _draw_link(draw)}
    if method in COLLABORATIVE and draw.random() < 0.5:
        network["topology"] = "star"
    if draw.random() < 0.3:
        network["links"] = [{"between": draw.sample(names, 2), **_draw_link(draw)}]
        if network.get("topology") == "star":
            network["links"][0]["between"] = [names[0], draw.choice(names[1:])]
    if method in SLOTTED and draw.random() < 0.5:
        network["link"]["message_loss"] = draw.choice(["5%", "20%"])
    return network


def _draw_fault(
    draw: random.Random, workload: Tree, names: Sequence[str], *, is_first: bool
) -> Tree:
    victim = draw.choice(names)
    kind = draw.choice(
        ["kill", "kill", "kill", "pause", "partition", "degrade", "throttle", "flap"]
    )
    duration = draw.choice(["1ms", "300ms", "1s", "2500ms", "6s"])
    value: Any = victim
    if kind == "partition":
        group = draw.sample(names, draw.randint(1, len(names) - 1))
        value = [sorted(group)]
    elif kind == "degrade":
        rate = draw.choice(["20kbit", "500kbit"])
        value = {"device": victim, "rate": rate, "delay": "50ms"}
    elif kind == "throttle":
        value = {"device": victim, "slowdown": draw.choice([2, 20])}
    elif kind == "flap":
        ends = draw.sample(names, 2)
        down = draw.choice(["50ms", "1s"])
        value = {"between": ends, "down": down, "up": "500ms"}
    moment = _draw_moment(draw, workload, names, is_first=is_first)
    return {kind: value, "for": duration} | moment


def _draw_moment(
    draw: random.Random, workload: Tree, names: Sequence[str], *, is_first: bool
) -> Tree:
    """Return the keys for the moment of a fault: a time, or a span or event of a device."""
    device = draw.choice(names)
    method = workload["method"]["name"]
    batch = draw.randrange(workload.get("requests") or workload["steps"])
    time = f"{draw.randint(0, 4000)}ms"
    span = draw.choice(SPANS.get(method, ("forward", "backward", "update")))
    event = draw.choice(EVENTS if method in INFERENCE else TRAINING_EVENTS)
    moments: list[Tree] = [
        {"at": time},
        {"when": {"device": device, "begins": "forward", "batch": batch}},
        {"when": {"device": device, "begins": span}},
        {"when": {"device": device, "event": event}},
    ]
    # "after" counts from the fault before, which the first fault lacks.
    if not is_first:
        moments.append({"after": f"{draw.choice([1, 200, 2000])}ms"})
    return draw.choice(moments)
