"""Simulated scenarios of a server and devices that own data, and the same training with torch alone."""

from functools import cache

import torch

from testbed.ml.data import load
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of

SHAPE = (1, 8, 8)
"""Channels, height and width of a sample of the digits."""


def make_scenario(
    method: str,
    devices: int | dict = 2,
    *,
    workload=None,
    options=None,
    server_speed="2mflops",
    device_speed="200kflops",
    **keys,
) -> Scenario:
    """Return a scenario of a server and ``devices`` equal devices; a mapping replaces all devices.

    ``workload`` and ``options`` change the workload and the options of the method, ``keys`` the keys of the scenario.
    """
    work = {
        "model": {"name": "mlp", "hidden": [12, 8]},
        "data": {"name": "digits", "train": 96, "test": 40, "split": "iid"},
        "training": {
            "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.001}
        },
        "batch_size": 16,
        "steps": 4,
        **(workload or {}),
        "method": {"name": method, **(options or {})},
    }
    # A single device trains on all samples, which the coordinator holds.
    if method == "single":
        work["data"] = {**work["data"], "split": "coordinator"}
    # A workload has either epochs or steps.
    if "epochs" in work:
        del work["steps"]
    if isinstance(devices, int):
        devices = {
            "server": {"speed": server_speed, "processors": 4},
            "device": {"speed": device_speed, "count": devices},
        }
    tree = {
        "name": "test",
        "seed": 3,
        "devices": devices,
        "network": {"topology": "star", "link": {"rate": "1mbit", "delay": "2ms"}},
        "workload": work,
        # On the virtual clock a long run costs nothing.
        "time_limit": "100000s",
    }
    return Scenario.model_validate({**tree, **keys})


def prepare_scenario(scenario: Scenario) -> Prepared:
    (trial,) = trials(scenario)
    return prepare(trial)


# Many tests use the same few data sets.
load_cached = cache(load)


def run_simulated(scenario: Scenario) -> Outcome:
    data = load_cached(scenario.workload.data)
    outcome = simulate(prepare_scenario(scenario), data)
    assert outcome.status == "finished", outcome.error
    return outcome


def participants_by_round(outcome: Outcome) -> list[list[str]]:
    """Return the devices that sent an update in each round."""
    # The field `samples` maps the names of these devices to the numbers of their samples.
    return [sorted(fields["samples"]) for fields in fields_of(outcome, "round")]


class TorchReference:
    """The undivided model, trained by torch's own optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        problem = prepare_scenario(scenario).problem
        self.module = problem.model.build(0, len(problem.model.units), problem.seed)
        optimizer = scenario.workload.training.optimizer
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), **optimizer.arguments()
        )

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, mini_batches: int = 1
    ) -> None:
        """Take one step with the mean gradient of mini-batches of equal size."""
        self.optimizer.zero_grad()
        image_chunks = images.chunk(mini_batches)
        label_chunks = labels.chunk(mini_batches)
        for inputs, targets in zip(image_chunks, label_chunks, strict=True):
            loss = torch.nn.functional.cross_entropy(self.module(inputs), targets)
            # Gradients accumulate: the sum of these quotients is the mean.
            (loss / mini_batches).backward()
        self.optimizer.step()

    def assert_same(self, outcome: Outcome, tolerance: float = 2e-6) -> None:
        """Compare all weights; the default tolerance allows for the rounding of float32."""
        expected = self.module.state_dict()
        assert outcome.weights is not None
        assert outcome.weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                outcome.weights[name], tensor, rtol=0, atol=tolerance
            )
