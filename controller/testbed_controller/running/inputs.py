"""What a run reads before it starts: its data, and the weights that it begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from testbed.common.errors import Diagnostic, InputError, TestbedError
from testbed.ml.lazy import torch
from testbed.prepare import Prepared, batches
from testbed.validation import batch_problems
from testbed_controller.running.live import LiveProgress

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.ml.data.dataset import Dataset
    from testbed.ml.models.chain import Model

    Weights = dict[str, torch.Tensor]


def load_data(prepared: Prepared) -> Dataset:
    """Return the samples of an experiment; raises `InputError` where a batch is larger than all of them."""
    import numpy as np

    from testbed.ml.data import load
    from testbed.ml.data.dataset import Dataset

    scenario = prepared.scenario
    if scenario.workload.task == "program":
        return Dataset("none", 0, *2 * (np.zeros((0, 1), np.float32), np.zeros(0, np.int64)))
    found = load(scenario.workload.data, scenario.data_folder, blank=scenario.workload.numerics == "none")
    if wrong := list(batch_problems(scenario.workload, len(found.train_labels))):
        # Of data in files nobody has counted the samples before.
        raise scenario.source.error(wrong)
    if scenario.workload.data.augment is not None and scenario.workload.numerics != "none":
        from testbed.ml.data.augment import drawing

        drawn = scenario.workload, prepared.problem.seed, found.shape, len(found.train_labels)
        try:
            found = replace(found, drawing=drawing(*drawn))
        except InputError as error:
            raise scenario.source.error([Diagnostic(("workload", *error.key), error.text)]) from None
    return found if prepared.problem.model.integers else found.floats()


class InitialWeights:
    """The weights that the runs of a scenario begin with, read or trained once for all that begin alike."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[Path, Model, Weights] | None = None

    def of(self, prepared: Prepared) -> Weights | None:
        """Return them, keyed as `Model.build` names them; None: they are drawn from the seed.

        Where they come from a scenario, that is simulated: the same weights on every host.
        """
        file, model = prepared.scenario.weights_file, prepared.problem.model
        if file is None:
            return None
        if self._last is None or self._last[:2] != (file, model):
            from testbed.ml.models.weights import read

            first = prepared.pretraining
            self._last = file, model, read(file, model) if first is None else self._train(first, file)
        return self._last[2]

    def _train(self, first: Prepared, file: Path) -> Weights:
        from testbed.simulation import simulate

        scenario = first.scenario
        begun = InitialWeights(self._console).of(first)
        with LiveProgress(self._console, scenario.name, batches(scenario, first.plan), "steps") as live:
            live.stage("training the weights to begin with")
            outcome = simulate(first, load_data(first), live.event, begun)
        if outcome.status != "finished" or outcome.weights is None:
            raise TestbedError(f"{file}, which trains the weights to begin with, {outcome.status}: {outcome.error}")
        return outcome.weights
