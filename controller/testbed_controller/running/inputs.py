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
        """Return initial weights with the keys of `Model.build`, or None if the seed determines them.

        Weights from a scenario are trained in simulation, so they are equal on every host.
        """
        if prepared.problem.workload.initial_weights is None:
            return None
        from testbed.ml.method import Problem
        from testbed.ml.preparation import pretraining_of, weights_file

        if not isinstance(prepared.problem, Problem):
            return None  # other kinds of work read their weights in `Workload.load`
        file, model = weights_file(prepared.scenario), prepared.problem.model
        assert file is not None
        if self._last is None or self._last[:2] != (file, model):
            from testbed.ml.models.weights import read

            first = pretraining_of(prepared)
            self._last = (
                file,
                model,
                read(file, model) if first is None else self._train(first, file),
            )
        return self._last[2]

    def _train(self, first: Prepared, file: Path) -> Weights:
        from testbed.simulation import simulate

        scenario = first.scenario
        begun = InitialWeights(self._console).weights_for(first)
        with LiveProgress(
            self._console, scenario.name, count_batches(scenario, first.plan), "steps"
        ) as live:
            live.stage("training the initial weights")
            outcome = simulate(first, first.workload.load(first), live.event, begun)
        if outcome.status != "finished" or outcome.weights is None:
            raise TestbedError(
                f"{file}, which trains the initial weights, {outcome.status}: {outcome.error}"
            )
        return outcome.weights
