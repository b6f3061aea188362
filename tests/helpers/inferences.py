"""Distributed inferences on the virtual clock, with the outputs of every request beside those of the whole model."""

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
from tests.helpers.runs import make_scenario

FC = {"name": "mlp", "hidden": [8, 16, 4]}
CNN = {"name": "cnn", "channels": [5, 7, 6], "hidden": [11, 9]}


@dataclass(frozen=True)
class Inference:
    """A run with what came out."""

    outcome: Outcome
    experiment: Experiment
    plan: Plan
    flow: Dataflow
    outputs: torch.Tensor
    """Of all requests that were answered, in their order."""
    error: float
    """Largest difference from the whole model's outputs, over the largest of those; nan where some are missing."""
    weights: Mapping[str, torch.Tensor]


def distributed_scenario(
    workers: int = 2, method: Mapping = {}, workload: Mapping = {}, **keys
) -> Scenario:
    """Return the scenario of two requests to a small fully connected network."""
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
    """Run; ``model`` takes the place of the scenario's, with random images of its size."""
    (trial,) = trials(spec)
    workload = spec.workload
    method = METHODS["distributed"]
    if model is None:
        from tests.helpers.runs import problem_of

        problem, data = problem_of(spec)
    else:
        options = method.Options.model_validate(workload.method.options())
        problem = PlanningProblem(
            trial.experiment.devices,
            trial.experiment.links,
            workload,
            options,
            spec.seed,
            model=model,
        )
        data = random_dataset(model, workload.requests * workload.batch_size)
    plan = method.plan(problem)
    outputs: dict[int, torch.Tensor] = {}
    add = Answers.add

    def seen(answers, index, output):
        outputs[index] = output
        add(answers, index, output)

    with patch.object(Answers, "add", seen):
        outcome = simulate(
            Prepared(trial, method, problem, plan), data, weights=weights
        )
    whole = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    if weights is not None:
        whole.load_state_dict(weights)
    with torch.no_grad():
        wanted = whole(
            torch.from_numpy(
                data.test_images[: workload.requests * workload.batch_size]
            )
        )
    found = (
        torch.cat([outputs[index] for index in sorted(outputs)])
        if outputs
        else torch.empty(0)
    )
    error = (
        float((found - wanted).abs().max() / wanted.abs().max())
        if found.shape == wanted.shape
        else float("nan")
    )
    flow = flow_of(problem, plan.details.distributed)
    return Inference(
        outcome, trial.experiment, plan, flow, found, error, whole.state_dict()
    )


def random_dataset(model: Model, samples: int) -> Dataset:
    """Return random images and labels for a model."""
    images = (
        np.random.default_rng(1)
        .standard_normal((samples, *model.input))
        .astype(np.float32)
    )
    labels = np.zeros(samples, np.int64)
    return Dataset("noise", model.classes, images, labels, images, labels)
