"""Tests of EdgePipe and VersatileFL with random losses, against an independent numpy implementation of both papers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from testbed.methods import METHODS
from testbed.ml.data.batches import batch
from tests.helpers.runs import make_scenario, problem_of, run_simulated
from tests.helpers.timeslots import EdgePipeReference, RunSetting, VersatileFLReference
from tests.testbed.ml.outcomes import field_values, times_of

STEPS = 14
BATCH_SIZE = 16
LEARNING_RATE = 0.2


def random_edgepipe(draw):
    """Draw options of EdgePipe, as keys of the scenario and as arguments of the reference."""
    conditions = ["all_losses", "all_results", "all_transmissions"]
    options = {"update_condition": draw.choice(conditions)}
    return options, options


def random_versatile(draw, seed):
    """Draw options of VersatileFL, as keys of the scenario and as arguments of the reference."""
    # The order of draws decides the cases: a change of the order changes all of them.
    threshold = draw.choice([None, 0.4, 0.6])
    same = {
        "grad_reuse_bw": draw.choice([None, 0, 3]),
        "patience": draw.randint(1, 5),
        "loss_window": draw.choice([1, 1, 2, 4]),
        "substitute_past_outputs": random.Random(f"past {seed}").random() < 0.3,
        "forward_criterion": random.Random(f"criterion {seed}").choice(
            ["larger", "larger", "at-least"]
        ),
    }
    granularity = draw.choice(["link", "neuron"])
    is_ideal = draw.random() < 0.3
    arguments = {
        **same,
        "thres_fw": threshold,
        "granularity": granularity,
        "ideal": is_ideal,
    }
    keys = {
        **same,
        "thres_fw": threshold and f"{threshold:.0%}",
        "backward_granularity": granularity,
        "result_sharing": "ideal" if is_ideal else "neuron",
        # In the reference neurons stay where they are.
        "rearrangement": False,
    }
    return keys, arguments


def random_case(name, seed):
    """Return a random scenario of a method, and the arguments of the reference."""
    draw = random.Random(f"{name} {seed}")
    layers, groups = draw.choice(
        [(4, 2), (4, 4), (6, 3), (6, 2), (6, 6), (4, 1), (3, 1), (3, 3)]
    )
    # The reference knows only groups of equally many devices.
    devices = draw.randint(1, 3) * groups if groups < 4 else groups
    hidden = [draw.randint(3, 14) for _ in range(layers - 2)]
    if name == "edgepipe":
        keys, arguments = random_edgepipe(draw)
    else:
        keys, arguments = random_versatile(draw, seed)
    method = {
        "name": name,
        "layers_per_group": layers // groups,
        "timeslot_margin": "50ms",
        "mapping": "random",
    }
    for key, value in keys.items():
        if value is not None:
            method[key] = value
    loss = draw.choice([2, 10, 20, 35, 50])
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": f"{loss}%"}}
    workload = {
        "model": {"name": "mlp", "hidden": hidden},
        "training": {"optimizer": {"learning_rate": LEARNING_RATE}},
        "steps": STEPS,
    }
    random_scenario = make_scenario(
        devices - 1, seed=seed + 1, workload=workload, method=method, network=network
    )
    return random_scenario, arguments


def reference_setting(random_scenario, outcome):
    """Return the data, initial weights, neurons of devices, and received casts of a run."""
    problem, data = problem_of(random_scenario)
    details = METHODS[random_scenario.workload.method.name].plan(problem).details
    count = len(details.devices) // len(details.groups)
    groups = []
    for first in range(0, len(details.devices), count):
        groups.append(list(details.devices[first : first + count]))
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    weights = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weights.append(
                (module.weight.detach().numpy(), module.bias.detach().numpy())
            )
    batches = []
    for step in range(STEPS):
        chosen = batch(len(data.train_labels), BATCH_SIZE, problem.seed, step)
        images = data.train_images[chosen].reshape(len(chosen), -1)
        batches.append((images, data.train_labels[chosen]))
    received = set()
    for event in outcome.events:
        if event.event == "receive" and "cast" in event.fields:
            received.add((event.fields["peer"], event.device, event.fields["cast"]))
    return RunSetting(groups, weights, batches, LEARNING_RATE, received)


def casts_in_training(outcome):
    """Return the number of casts of each device before the first test."""
    until = min(times_of(outcome, "test_start"), default=0)
    casts = Counter()
    for event in outcome.events:
        if event.event == "cast" and event.time < until:
            casts[event.device] += 1
    return casts


REFERENCES = {"edgepipe": EdgePipeReference, "versatile": VersatileFLReference}


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_losses_and_casts_equal_reference_implementation(name, seed):
    random_scenario, arguments = random_case(name, seed)
    outcome = run_simulated(random_scenario)
    setting = reference_setting(random_scenario, outcome)
    reference = REFERENCES[name](setting, **arguments).train()
    losses = field_values(outcome, "step", "loss")
    assert losses == pytest.approx(reference.losses, rel=1e-6, abs=1e-6)
    # Casts are numbered: another number of casts of a device would shift all its later received casts.
    casts = casts_in_training(outcome)
    for node_name, node in reference.nodes.items():
        assert casts[node_name] == node.casts
