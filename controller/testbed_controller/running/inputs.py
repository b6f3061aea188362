"""Initial weights of runs, from a file or trained by another scenario in simulation."""

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
    """The initial weights of runs; successive runs with equal initial weights read or train them once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cached: tuple[Path, Model, Weights] | None = None

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
        # The runs of a sweep often have the same initial weights, and training these takes long.
        if self._cached is None or self._cached[:2] != (file, model):
            from testbed.ml.models.weights import read

            pretraining = pretraining_of(prepared)
            if pretraining is not None:
                self._cached = (file, model, self._train(pretraining, file))
            else:
                self._cached = (file, model, read(file, model))
        return self._cached[2]

    def _train(self, pretraining: Prepared, file: Path) -> Weights:
        from testbed.simulation import simulate

        scenario = pretraining.scenario
        # The scenario may itself begin with weights from another one.
        inherited_weights = InitialWeights(self._console).weights_for(pretraining)
        steps = count_batches(scenario, pretraining.plan)
        with LiveProgress(self._console, scenario.name, steps, "steps") as live:
            live.stage("training the initial weights")
            data = pretraining.workload.load(pretraining)
            outcome = simulate(pretraining, data, live.event, inherited_weights)
        if outcome.status != "finished" or outcome.weights is None:
            raise TestbedError(
                f"{file}, which trains the initial weights, {outcome.status}: {outcome.error}"
            )
        return outcome.weights
