"""Initial weights of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from testbed.common.errors import TestbedError
from testbed.ml.lazy import torch
from testbed.prepare import Prepared, count_batches
from testbed_controller.running.live import LiveProgress

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.ml.models.chain import Model

    Weights = dict[str, torch.Tensor]


class InitialWeights:
    """The initial weights of a scenario's runs, read or trained once for all runs with equal ones."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[Path, Model, Weights] | None = None

    def weights_for(self, prepared: Prepared) -> Weights | None:
        """Return initial weights with the keys of `Model.build`; None for weights drawn from the seed.

        Weights from a scenario are trained in simulation, so they are equal on every host.
        """
        if prepared.problem.workload.initial_weights is None:
            return None
        from testbed.ml.method import PlanningProblem
        from testbed.ml.preparation import pretraining_of, weights_file

        if not isinstance(prepared.problem, PlanningProblem):
            return None  # other kinds of work read their weights in `Workload.load`
        file = weights_file(prepared.scenario)
        model = prepared.problem.model
        assert file is not None
        # Runs of a sweep often share their weights, whose training takes long.
        if self._last is None or self._last[:2] != (file, model):
            from testbed.ml.models.weights import read

            first = pretraining_of(prepared)
            weights = read(file, model) if first is None else self._train(first, file)
            self._last = (file, model, weights)
        return self._last[2]

    def _train(self, first: Prepared, file: Path) -> Weights:
        from testbed.simulation import simulate

        scenario = first.scenario
        # The scenario may itself begin with weights from another one.
        begun = InitialWeights(self._console).weights_for(first)
        steps = count_batches(scenario, first.plan)
        with LiveProgress(self._console, scenario.name, steps, "steps") as live:
            live.stage("training the initial weights")
            data = first.workload.load(first)
            outcome = simulate(first, data, live.event, begun)
        if outcome.status != "finished" or outcome.weights is None:
            raise TestbedError(
                f"{file}, which trains the initial weights, {outcome.status}: {outcome.error}"
            )
        return outcome.weights
