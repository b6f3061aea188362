"""Random scenarios: any method, topology, network, link and option, and any fault at any moment that a file can name.

All of it follows from one number, the seed. Every fault is undone again, so that a run that does not end has something
wrong with it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Tree = dict[str, Any]
"""A scenario as a file has it."""

PIPELINE: Mapping[str, Sequence[Any]] = {
    "stall_timeout": ["200ms", "500ms", "2s"],
    "return_window": ["3s", "5s", "15s"],
    "evaluate_every": [1, 5, None],
}
ASYNCHRONOUS: Mapping[str, Sequence[Any]] = {
    **PIPELINE,
    "in_flight": [1, 2, 3, None],
    "vertical_sync": [True, False],
    "aggregate": [0, 1, 2],
    "chain_every": [0, 1, 3],
    "global_every": [1, 4],
    "copies": [1, 2],
}
ROUNDS: Mapping[str, Sequence[Any]] = {
    "local_steps": [1, 2, 4],
    "round_deadline": ["5s", "20s", None],
    "evaluate_every": [1, 3],
    "min_devices": [1, 2],
}
SLOTS: Mapping[str, Sequence[Any]] = {
    "allocation": ["vertical", "hybrid", "horizontal"],
    "mapping": ["random", "genetic"],
    "recovery": ["none", "r-tx", "ack"],
    "test_runs": [1, 3],
    "evaluate_every": [5, None],
    "margin": ["10ms", "100ms"],
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
    "split-learning": {
        key: values for key, values in ROUNDS.items() if key != "min_devices"
    },
    "split-federated": ROUNDS,
    "pipelearn": {**ROUNDS, "parallel": [1, 2, "best"]},
    "edgepipe": {**SLOTS, "pipelined": [True, False]},
    "versatile": {
        **SLOTS,
        "substitution": [True, False],
        "reuse": [True, False],
        "rearrangement": [True, False],
    },
    "sequential": {
        key: values for key, values in PIPELINE.items() if key != "evaluate_every"
    }
    | {"in_flight": [1, 3]},
    "distributed": {
        "scheme": ["lop", "lip", "fuse", "optimal"],
        "exchange": ["source", "direct"],
        "in_flight": [1, 2],
        "on_loss": ["replan", "fail"],
        "stall_timeout": ["500ms", "2s"],
    },
}
INFERENCE = ("sequential", "distributed")
COLLABORATIVE = ("federated", "split-learning", "split-federated", "pipelearn")
SLOTTED = ("edgepipe", "versatile")
SYNCHRONOUS = ("pipeline", "gpipe", "model-parallelism")
"""Methods that compute what the undivided model does, whatever happens."""
LOSSLESS = (*COLLABORATIVE, "single", *SYNCHRONOUS, "ftpipehd", "pipedream", "respipe")
"""Methods that train every step however often it takes."""

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
"""What a device of a method may be about to do; all do these: forward and backward."""
EVENTS = ("send", "receive", "begin", "compute", "memory", "state")
TRAINING_EVENTS = (*EVENTS, "step", "evaluate")


def scenario(seed: int) -> Tree:
    """Return the scenario of a seed."""
    draw = random.Random(seed)
    method = draw.choice(list(OPTIONS))
    names = ["source", *(f"w{number}" for number in range(draw.randint(1, 4)))]
    devices: Tree = {name: _device(draw) for name in names}
    options = {
        name: draw.choice(values)
        for name, values in OPTIONS[method].items()
        if draw.random() < 0.4
    }
    hidden = [
        draw.choice([8, 12, 16, 24])
        for _ in range(draw.randint(max(2, len(names) - 1), 6))
    ]
    workload: Tree = {
        "model": {"name": "mlp", "hidden": hidden},
        "data": {"name": "digits", "train": 160, "test": 32},
        "method": {
            "name": method,
            **{key: value for key, value in options.items() if value is not None},
        },
        "batch_size": draw.choice([8, 16]),
    }
    if method in INFERENCE:
        workload |= {"task": "infer", "requests": draw.randint(1, 12)}
    else:
        workload |= {
            "steps": draw.randint(1, 16),
            "training": {
                "optimizer": {"learning_rate": 0.05, "momentum": draw.choice([0, 0.9])}
            },
        }
    if method in COLLABORATIVE:
        workload["data"]["split"] = draw.choice(
            ["iid", {"dirichlet": 0.5}, {"shards": 3}]
        )
        workload["steps"] = workload["method"].get("local_steps", 1) * draw.randint(
            1, 6
        )
    return {
        "name": f"stress-{seed}",
        "seed": draw.randint(0, 9),
        "devices": devices,
        "network": _network(draw, method, names),
        "workload": workload,
        "faults": [
            _fault(draw, workload, names, number == 0)
            for number in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))
        ],
        "time_limit": "3000s",
    }


def _device(draw: random.Random) -> Tree:
    device: Tree = {"speed": draw.choice(["3mflops", "20mflops", "300mflops"])}
    if draw.random() < 0.2:
        device["uplink"] = draw.choice(["2mbit", "10mbit"])
    return device


def _link(draw: random.Random) -> Tree:
    link: Tree = {
        "rate": draw.choice(["1mbit", "10mbit", "100mbit"]),
        "delay": draw.choice(["2ms", "20ms"]),
    }
    if draw.random() < 0.3:
        link["jitter"] = "1ms"
    if draw.random() < 0.3:
        link["loss"] = draw.choice(["0.1%", "2%"])
    return link


def _network(draw: random.Random, method: str, names: Sequence[str]) -> Tree:
    network: Tree = {"link": _link(draw)}
    if method in COLLABORATIVE and draw.random() < 0.5:
        network["topology"] = "star"
    if draw.random() < 0.3:
        network["links"] = [{"between": draw.sample(names, 2), **_link(draw)}]
        if network.get("topology") == "star":
            network["links"][0]["between"] = [names[0], draw.choice(names[1:])]
    if method in SLOTTED and draw.random() < 0.5:
        network["link"]["message_loss"] = draw.choice(["5%", "20%"])
    return network


def _fault(
    draw: random.Random, workload: Tree, names: Sequence[str], first: bool
) -> Tree:
    victim = draw.choice(names)
    kind = draw.choice(
        ["kill", "kill", "kill", "pause", "partition", "degrade", "throttle", "flap"]
    )
    lasting = draw.choice(["1ms", "300ms", "1s", "2500ms", "6s"])
    fault: Tree
    if kind == "partition":
        group = draw.sample(names, draw.randint(1, len(names) - 1))
        fault = {"partition": [sorted(group)]}
    elif kind == "degrade":
        fault = {
            "degrade": {
                "device": victim,
                "rate": draw.choice(["20kbit", "500kbit"]),
                "delay": "50ms",
            }
        }
    elif kind == "throttle":
        fault = {"throttle": {"device": victim, "slowdown": draw.choice([2, 20])}}
    elif kind == "flap":
        fault = {
            "flap": {
                "between": draw.sample(names, 2),
                "down": draw.choice(["50ms", "1s"]),
                "up": "500ms",
            }
        }
    else:
        fault = {kind: victim}
    watched = draw.choice(names)
    method = workload["method"]["name"]
    batch = draw.randrange(workload.get("requests") or workload["steps"])
    moments: list[Tree] = [
        {"at": f"{draw.randint(0, 4000)}ms"},
        {"when": {"device": watched, "begins": "forward", "batch": batch}},
        {
            "when": {
                "device": watched,
                "begins": draw.choice(
                    SPANS.get(method, ("forward", "backward", "update"))
                ),
            }
        },
        {
            "when": {
                "device": watched,
                "event": draw.choice(
                    EVENTS if method in INFERENCE else TRAINING_EVENTS
                ),
            }
        },
    ]
    if not first:
        moments.append({"after": f"{draw.choice([1, 200, 2000])}ms"})
    return fault | {"for": lasting} | draw.choice(moments)
