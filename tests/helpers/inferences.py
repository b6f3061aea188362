"""Simulated distributed inferences, with the outputs of every request and those of the undivided model."""

from collections.abc import Mapping
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch

from testbed.experiment import Experiment
from testbed.methods import METHODS
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers.feed import Answers
from testbed.ml.method import PlanningProblem
from testbed.ml.models.chain import Model
from testbed.plan import Plan
from testbed.prepare import Prepared
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from testbed_stahl.dataflow import Dataflow
from testbed_stahl.planner import flow_of
from tests.helpers.runs import make_scenario, problem_of

FC = {"name": "mlp", "hidden": [8, 16, 4]}
CNN = {"name": "cnn", "channels": [5, 7, 6], "hidden": [11, 9]}


@dataclass(frozen=True)
class Inference:
    """A finished run and its outputs."""

    outcome: Outcome
    experiment: Experiment
    plan: Plan
    flow: Dataflow
    outputs: torch.Tensor
    """Outputs of all answered requests, in the order of the requests."""
    error: float
    """Largest difference from the undivided model's outputs, relative to the largest of these; nan if some are missing.
    """
    weights: Mapping[str, torch.Tensor]
    """State of the undivided model."""


def distributed_scenario(
    workers: int = 2, method: Mapping = {}, workload: Mapping = {}, **keys
) -> Scenario:
    """Return a scenario of two requests to a small fully connected network."""
    work = {"task": "infer", "model": FC, "requests": 2, "batch_size": 2, **workload}
    return make_scenario(
        workers,
        workload=work,
        method={"name": "distributed", "tiled_layers": 0, **method},
        **keys,
    )


def run_inference(
    spec: Scenario,
    model: Model | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Inference:
    """Simulate a scenario. ``model`` replaces the scenario's model and processes random images."""
    (trial,) = trials(spec)
    method = METHODS["distributed"]
    samples = spec.workload.requests * spec.workload.batch_size
    if model is None:
        problem, data = problem_of(spec)
    else:
        problem = PlanningProblem(
            trial.experiment.devices,
            trial.experiment.links,
            spec.workload,
            method.Options.model_validate(spec.workload.method.options()),
            spec.seed,
            model=model,
        )
        data = random_dataset(model, samples)
    plan = method.plan(problem)
    prepared = Prepared(trial, method, problem, plan)
    outputs: dict[int, torch.Tensor] = {}
    original_add = Answers.add

    def keep_output(answers, index, output):
        outputs[index] = output
        original_add(answers, index, output)

    # A run reports only the accuracy of its outputs, so they are copied before they are compared with the labels.
    with patch.object(Answers, "add", keep_output):
        outcome = simulate(prepared, data, weights=weights)
    whole = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    if weights is not None:
        whole.load_state_dict(weights)
    with torch.no_grad():
        expected = whole(torch.from_numpy(data.test_images[:samples]))
    ordered = [outputs[index] for index in sorted(outputs)]
    answers = torch.cat(ordered) if ordered else torch.empty(0)
    return Inference(
        outcome,
        trial.experiment,
        plan,
        flow_of(problem, plan.details.distributed),
        answers,
        relative_error(answers, expected),
        whole.state_dict(),
    )


def relative_error(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    # After a failure, some requests may have no answer.
    if outputs.shape != expected.shape:
        return float("nan")
    return float((outputs - expected).abs().max() / expected.abs().max())


def random_dataset(model: Model, samples: int) -> Dataset:
    """Return normally distributed images of the model's input shape, all with label 0."""
    draws = np.random.default_rng(1)
    images = draws.standard_normal((samples, *model.input)).astype(np.float32)
    labels = np.zeros(samples, np.int64)
    return Dataset("noise", model.classes, images, labels, images, labels)
