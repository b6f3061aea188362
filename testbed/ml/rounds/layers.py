"""Training in rounds on one device: the device's layers of the model, and the device's samples.

`Layers` charges each operation to the device. A device with data trains all layers, or the first ones; the server of a
split method trains the remaining layers with the same class. `LocalDataset` divides the samples of a device into
iterations (steps of the optimizer) and an iteration into mini-batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from testbed.device import Cost, Device, Span
from testbed.ml.data.batches import Indices, batch, batch_length, steps_per_epoch
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers import costs
from testbed.ml.layers.shape_shard import make_shard
from testbed.ml.layers.shard import Adjust, State, weights_of
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.training.optimizers import is_weight


class Layers:
    """Some layers of the model under training on one device; the asynchronous methods take the device's time.

    Most arguments have one meaning in all methods: ``step`` is the number of an iteration, counted through all rounds,
    and ``micro`` the number of a mini-batch in its iteration, from 0.
    """

    def __init__(
        self,
        device: Device,
        problem: PlanningProblem,
        start: int,
        stop: int,
        *,
        computes_values: bool = True,
    ) -> None:
        """Create the model's units ``start`` to ``stop`` (exclusive) with the weights of the problem's seed.

        If ``computes_values`` is False, or in a timing-only run, operations take the device's time, and their results
        have a shape but no values.
        """
        workload = problem.workload
        self.computes_values = computes_values and workload.numerics != "none"
        # The server averages the global model over rounds, so a device must not average its weights over steps.
        without_averages = workload.training.model_copy(update={"ema": None})
        changes: dict[str, Any] = {"training": without_averages}
        if not computes_values:
            changes["numerics"] = "none"
        problem = replace(problem, workload=workload.model_copy(update=changes))
        self.start = start
        self.stop = stop
        self._device = device
        self._units = problem.model.units[start:stop]
        self.training = problem.training
        self._shard = make_shard(problem, start, stop, device.name)

    @property
    def device_name(self) -> str:
        """The device's name."""
        return self._device.name

    def rate(self, step: int) -> float:
        """Return the learning rate of an iteration, following the schedule."""
        constant_rate = self.training.part.optimizer.rate
        # The settings lack "lr" if no schedule changes the rate.
        return float(self.training.settings(step).get("lr", constant_rate))

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return costs.count_parameters(self._units)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights and the running statistics."""
        return weights_of(self._shard.state())

    async def load(self, weights: State, number: int) -> None:
        """Replace the weights by the given weights of round ``number``; the optimizer's state stays."""

        def load() -> None:
            state = dict(weights)
            # Optimizer state, such as momentum, is neither sent nor averaged, so each device keeps its own state.
            for name, tensor in self._shard.state().items():
                if not is_weight(name):
                    state[name] = tensor
            self._shard.load(state)

        cost = costs.copy_cost(self._units, self.training)
        await self._device.compute(load, cost, Span("load", number))

    async def forward(
        self,
        step: int,
        micro: int,
        inputs: torch.Tensor,
        samples: int,
        *,
        begin: int = 0,
    ) -> torch.Tensor:
        """Return the outputs of a mini-batch; inputs and outputs are (samples of the mini-batch, ...).

        ``samples`` is the number of samples of the whole iteration, and ``begin`` the index of the mini-batch's first
        sample among them.
        """
        # Random numbers are drawn for the whole iteration, so they do not depend on the number of mini-batches.
        rows = (begin, samples)
        work = partial(self._shard.forward, (step, micro), inputs, rows=rows)
        cost = costs.forward_cost(self._units, len(inputs))
        return await self._device.compute(work, cost, Span("forward", step, micro))

    async def forward_loss(
        self,
        step: int,
        micro: int,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        samples: int,
        total_weight: float,
        *,
        begin: int = 0,
    ) -> float:
        """Run a mini-batch through the model's last layers; return the mini-batch's part of the iteration's mean loss.

        ``inputs`` are (samples of the mini-batch, ...), ``labels`` (samples of the mini-batch,). ``samples`` and
        ``begin`` are as in `forward`. ``total_weight`` is the `TrainingConfig.weight` of all labels of the iteration.
        """
        rows = (begin, samples)
        work = partial(
            self._shard.forward_loss,
            (step, micro),
            inputs,
            labels,
            total_weight,
            rows=rows,
        )
        cost = costs.forward_cost(self._units, len(inputs))
        return await self._device.compute(work, cost, Span("forward", step, micro))

    async def backward(
        self,
        step: int,
        micro: int,
        samples: int,
        gradient: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Do the backward of a mini-batch, and return the gradient of the inputs, (samples, ...).

        ``samples`` is here the number of samples of the mini-batch. ``gradient`` is the gradient of the outputs,
        (samples, ...); None if the forward computed the loss.
        """
        work = partial(self._shard.backward, (step, micro), gradient)
        cost = costs.backward_cost(self._units, samples)
        return await self._device.compute(work, cost, Span("backward", step, micro))

    async def adjust(self, step: int, change: Adjust, flops: float = 2.0) -> None:
        """Apply ``change`` to the gradients of the next update.

        The device is charged ``flops`` for each trained value, also in timing-only runs.
        """
        work = partial(self._shard.adjust, change)
        cost = Cost(flops * self.parameters)
        await self._device.compute(work, cost, Span("adjust", step))

    @property
    def clips_by_norm(self) -> bool:
        """Whether an update needs the gradient norms of all layers of the model."""
        clip = self.training.part.clip
        return clip is not None and clip.norm is not None

    def norms(self) -> torch.Tensor:
        """Return the norm of the gradient of each trained tensor, (tensors,)."""
        return self._shard.norms()

    async def update(self, step: int, norms: torch.Tensor | None = None) -> None:
        """Take an optimizer step with the gradients of all mini-batches since the last update.

        ``norms``, (tensors,), are the gradient norms of the whole model for clipping; None if these layers are the
        whole model.
        """
        work = partial(self._shard.update, step, norms)
        cost = costs.update_cost(self._units, self.training)
        await self._device.compute(work, cost, Span("update", step))

    async def infer(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of batch ``index`` of an evaluation; ``inputs`` and outputs are (samples, ...)."""
        work = partial(self._shard.infer, inputs)
        cost = costs.forward_cost(self._units, len(inputs))
        return await self._device.compute(work, cost, Span("evaluate", index))


class LocalDataset:
    """A device's samples, divided into iterations of N mini-batches of floor(B/N) samples each.

    B is ``batch_size``, or the number of samples if that is smaller; N is ``parallel_batches``. With a seed, the
    samples of each epoch are in a new random order, otherwise in the order of the data set. An epoch has as many whole
    iterations as its samples fill. With ``drop_last`` the remaining samples are skipped; in a random order they are
    others in each epoch. Without ``drop_last`` the remaining samples form one more iteration, whose mini-batches have
    the same size except for the last one.

    >>> import numpy as np
    >>> images, labels = np.zeros((33, 1, 8, 8), np.float32), np.zeros(33, np.int64)
    >>> data = Dataset("example", 2, images, labels, images[:0], labels[:0])
    >>> samples = LocalDataset(data, batch_size=20, parallel_batches=2, seed=1, drop_last=False)
    >>> for number in range(samples.per_epoch):
    ...     print([len(labels) for _, labels in samples.iteration(number)])
    [10, 10]
    [10, 3]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        parallel_batches: int,
        seed: int | None,
        *,
        drop_last: bool = True,
    ) -> None:
        """Divide the training samples of ``dataset``; raises ValueError for fewer samples than mini-batches."""
        self._dataset = dataset
        self._seed = seed
        self.samples = len(dataset.train_labels)
        """Number of the device's samples."""
        self.parallel_batches = parallel_batches
        self.mini_batch = min(batch_size, self.samples) // parallel_batches
        """Number of samples of a mini-batch."""
        if not self.mini_batch:
            raise ValueError(
                f"{parallel_batches} mini-batches need at least as many samples, not {self.samples}"
            )
        self._iteration_samples = self.mini_batch * parallel_batches
        """Number of samples of a whole iteration."""
        self._drop_last = drop_last
        self.per_epoch = steps_per_epoch(
            self.samples, self._iteration_samples, drop_last=drop_last
        )
        """Number of iterations of an epoch."""

    def iteration(
        self, number: int, *, needs_values: bool = True
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the mini-batches of an iteration: inputs, (samples, ...), and labels, (samples,).

        Without ``needs_values`` every whole iteration has the samples of the first one, which are read once.
        """
        is_whole = self.count(number) == self._iteration_samples
        if is_whole and not needs_values:
            return self._first_iteration
        return self._read_samples(number)

    def count(self, number: int) -> int:
        """Return the number of samples of an iteration."""
        return batch_length(
            self.samples, self._iteration_samples, number, drop_last=self._drop_last
        )

    @cached_property
    def _first_iteration(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._read_samples(0)

    def _read_samples(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        indices: Indices = batch(
            self.samples,
            self._iteration_samples,
            self._seed,
            number,
            drop_last=self._drop_last,
        )
        # The epoch decides the augmentation of the samples.
        epoch = number // self.per_epoch
        images = torch.from_numpy(self._dataset.batch(indices, epoch))
        labels = torch.from_numpy(self._dataset.train_labels[indices])
        mini_batches = []
        for start in range(0, len(labels), self.mini_batch):
            rows = slice(start, start + self.mini_batch)
            mini_batches.append((images[rows], labels[rows]))
        return mini_batches
