"""Both methods on random patterns of losses beside `tests.helpers.timeslots`, which is written from their papers."""

from __future__ import annotations

import random

import pytest
import torch

from testbed.methods import METHODS
from testbed.ml.data.batches import batch
from tests.helpers.runs import fields_of, problem_of, run_simulated, scenario
from tests.helpers.timeslots import EdgePipe, Setting, VersatileFL

STEPS, BATCH, RATE = 14, 16, 0.2


def drawn(name, seed):
    """Return the keys of a random case, and those of the method."""
    draw = random.Random(f"{name} {seed}")
    layers, groups = draw.choice(
        [(4, 2), (4, 4), (6, 3), (6, 2), (6, 6), (4, 1), (3, 1), (3, 3)]
    )
    devices = draw.randint(1, 3) * groups if groups < 4 else groups
    hidden = [draw.randint(3, 14) for _ in range(layers - 2)]
    method = {
        "name": name,
        "layers_per_group": layers // groups,
        "timeslot_margin": "50ms",
        "mapping": "random",
    }
    if name == "edgepipe":
        own = {
            "update_condition": draw.choice(
                ["all_losses", "all_results", "all_transmissions"]
            )
        }
        method |= own
    else:
        own = {
            "thres_fw": draw.choice([None, 0.4, 0.6]),
            "grad_reuse_bw": draw.choice([None, 0, 3]),
            "patience": draw.randint(1, 5),
            "loss_window": draw.choice([1, 1, 2, 4]),
        }
        own |= {
            "granularity": draw.choice(["link", "neuron"]),
            "ideal": draw.random() < 0.3,
        }
        own["substitute_past_outputs"] = random.Random(f"past {seed}").random() < 0.3
        method |= {
            "backward_granularity": own["granularity"],
            "result_sharing": "ideal" if own["ideal"] else "neuron",
        }
        same = ("grad_reuse_bw", "patience", "loss_window", "substitute_past_outputs")
        method |= {"rearrangement": False, **{key: own[key] for key in same}}
        method["thres_fw"] = own["thres_fw"] and f"{own['thres_fw']:.0%}"
    loss = draw.choice([2, 10, 20, 35, 50])
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": f"{loss}%"}}
    workload = {
        "model": {"name": "mlp", "hidden": hidden},
        "training": {"optimizer": {"learning_rate": RATE}},
        "steps": STEPS,
    }
    keys = {
        "workload": workload,
        "method": {k: v for k, v in method.items() if v is not None},
        "network": network,
    }
    return scenario(devices - 1, seed=seed + 1, **keys), own


def setting(written, outcome):
    """Return what the reference needs of a run: its data, first weights, who holds what, and which casts were heard."""
    problem, data = problem_of(written)
    details = METHODS[written.workload.method.name].plan(problem).details
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    dense = [
        module for module in model.modules() if isinstance(module, torch.nn.Linear)
    ]
    count = len(details.devices) // len(details.groups)
    heard = {
        (event.fields["peer"], event.device, event.fields["cast"])
        for event in outcome.events
        if event.event == "receive" and "cast" in event.fields
    }
    batches = [
        batch(len(data.train_labels), BATCH, problem.seed, step)
        for step in range(STEPS)
    ]
    return Setting(
        [
            list(details.devices[at : at + count])
            for at in range(0, len(details.devices), count)
        ],
        [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in dense],
        [
            (data.train_images[each].reshape(len(each), -1), data.train_labels[each])
            for each in batches
        ],
        RATE,
        heard,
    )


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_every_loss_is_that_of_the_papers_arithmetic(name, seed):
    written, own = drawn(name, seed)
    outcome = run_simulated(written)
    given = setting(written, outcome)
    expected = (EdgePipe if name == "edgepipe" else VersatileFL)(given, **own).train()
    losses = [step["loss"] for step in fields_of(outcome, "step")]
    assert losses == pytest.approx(expected.losses, rel=1e-6, abs=1e-6)
    # Also who had something to cast: more would be out of step with what was heard from the first difference on.
    until = min(
        (event.time for event in outcome.events if event.event == "test_start"),
        default=0,
    )
    casts = dict.fromkeys(expected.nodes, 0)
    for event in outcome.events:
        casts[event.device] = casts.get(event.device, 0) + (
            event.event == "cast" and event.time < until
        )
    assert {node: casts[node] for node in expected.nodes} == {
        name: node.casts for name, node in expected.nodes.items()
    }
