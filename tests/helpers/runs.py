"""Simulated scenarios, each described by its differences from a small default scenario."""

from collections.abc import Mapping
from functools import cache

import torch

from testbed.methods import METHODS
from testbed.ml.data import load
from testbed.ml.fields import InputSpec
from testbed.ml.learning import model_of
from testbed.ml.method import PlanningProblem
from testbed.plan import Plan
from testbed.prepare import Prepared
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome

WORKLOAD = {
    "model": {"name": "mlp", "hidden": [12, 10, 8, 8]},
    "data": {"name": "digits", "train": 96, "test": 40},
    "method": {"name": "pipeline"},
    "training": {
        "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.001}
    },
    "batch_size": 16,
    "steps": 12,
}


def make_scenario(*args, **keys):
    """Return a scenario of a source and equal workers, from the arguments of `scenario_keys`."""
    return Scenario.model_validate(scenario_keys(*args, **keys))


def scenario_keys(
    workers: int = 3,
    speed: str = "20mflops",
    workload: Mapping = {},
    method: Mapping = {},
    **keys,
):
    """Return the keys of a scenario file with a source and ``workers`` equal workers."""
    work = {**WORKLOAD, **workload}
    if work.get("task") == "infer":
        # Inference counts requests.
        work.pop("steps", None)
    work["method"] = {**WORKLOAD["method"], **method}
    devices = {"source": {"speed": speed}}
    # Without workers, the source is the only device.
    if workers:
        devices["worker"] = {"speed": speed, "count": workers}
    tree = {
        "name": "test",
        "seed": 3,
        "devices": devices,
        "workload": work,
        "time_limit": "1000s",
    }
    tree["network"] = {"link": {"rate": "20mbit", "delay": "2ms"}}
    return {**tree, **keys}


_load = cache(load)  # many tests use the same few data sets


def problem_of(scenario: Scenario) -> tuple[PlanningProblem, object]:
    """Return the planning problem of a scenario and its data."""
    (trial,) = trials(scenario)
    workload = scenario.workload
    data = _load(workload.data)
    model = model_of(workload, None, data.classes, InputSpec(data.shape))
    options = METHODS[workload.method.name].Options.model_validate(
        workload.method.options()
    )
    devices, links = trial.experiment.devices, trial.experiment.links
    return PlanningProblem(
        devices, links, workload, options, scenario.seed, model=model
    ), data


def run_simulated(
    scenario: Scenario, plan: Plan | None = None, weights=None, on_event=None, **options
) -> Outcome:
    """Simulate a scenario, with its method's plan unless ``plan`` is set."""
    (trial,) = trials(scenario)
    problem, data = problem_of(scenario)
    method = METHODS[scenario.workload.method.name]
    return simulate(
        Prepared(trial, method, problem, plan or method.plan(problem)),
        data,
        on_event,
        weights,
        **options,
    )


def events_of(outcome: Outcome, *names: str):
    """Return the events with these names as (device, fields)."""
    return [(event.device, dict(event.fields)) for event in outcome.events.of(*names)]


def fields_of(outcome: Outcome, name: str) -> list[dict]:
    """Return the fields of all events with this name."""
    return [fields for _, fields in events_of(outcome, name)]


def train_with_torch(
    scenario: Scenario, weights=None
) -> tuple[torch.nn.Module, list[float]]:
    """Train the undivided model with torch alone on the batches of the scenario; return the model and all losses."""
    from testbed.ml.data.batches import batch

    problem, data = problem_of(scenario)
    workload = scenario.workload
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(
        model.parameters(), **workload.training.optimizer.arguments()
    )
    losses = []
    for step in range(workload.steps):
        chosen = batch(len(data.train_labels), workload.batch_size, problem.seed, step)
        images = torch.from_numpy(data.train_images[chosen])
        labels = torch.from_numpy(data.train_labels[chosen])
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses
