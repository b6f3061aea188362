"""Local training of many simulated devices in one computation (``numerics: stacked``), by torch's ``vmap``.

The weights and samples of the devices are stacked along a new first axis. On the virtual clock each device is charged
for its training as usual. Values are computed when the first device needs the result of its training; all similar
trainings that have been registered by then are computed together. The gain is largest for small networks, for which
calling an operation takes longer than its arithmetic. In containers each device is a process of its own and trains as
with ``numerics: full``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from testbed.common.errors import InputError
from testbed.ml.layers.shard import State, has_random_numbers
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.rounds.layers import LocalDataset
from testbed.ml.training.optimizers import Sgd

MAX_STACK = 256
"""Maximum number of devices computed together; a larger stack takes more memory and is no faster."""


@dataclass(eq=False)
class Training:
    """One device's training in a round, computed on demand, or earlier together with others."""

    stack: Stack
    share: LocalDataset
    """The device's samples."""
    steps: range
    """Iterations of the round, counted through all rounds."""
    start: State
    """Weights at the beginning of the round, by name."""
    result: tuple[float, State] | None = None
    """The mean loss and the new weights, after the computation."""

    def finish(self) -> tuple[float, State]:
        """Return the mean loss and the new weights; compute all registered trainings if the result is missing."""
        if self.result is None:
            self.stack.compute()
        assert self.result is not None
        return self.result


def check_support(problem: PlanningProblem, *, has_default_training: bool) -> None:
    """Raise `InputError` if the trainings of a problem cannot be stacked.

    ``has_default_training`` is whether the method trains by `train_whole` instead of a hook of its own.
    """
    training = problem.workload.training
    optimizer = training.optimizer
    model = problem.model
    module = model.build(0, len(model.units), problem.seed)
    has_other_optimizer = not optimizer.is_plain or optimizer.momentum
    has_other_precision = any(device.precision != "f32" for device in problem.devices)
    # Each value is true, or not empty, if the reason applies.
    reasons = {
        "local training of the method's own": not has_default_training,
        "an optimizer other than sgd, or momentum": has_other_optimizer,
        "clipping": training.clip,
        "a precision other than f32": has_other_precision,
        "running statistics, as of batch normalisation": list(module.buffers()),
        "weights that several layers share": model.tied_weights,
        "layers that may draw, such as dropout": has_random_numbers(module),
        "a smaller last batch": not problem.workload.drop_last,
        "weights that are not trained": model.frozen_parameters,
    }
    unsupported = [reason for reason, applies in reasons.items() if applies]
    if unsupported:
        text = f"'stacked' does not support {' and '.join(unsupported)}: use full"
        raise InputError(text, ("numerics",))


class Stack:
    """All trainings of a simulation without a result so far; the devices share one stack."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._pending: list[Training] = []

    def begin(self, share: LocalDataset, steps: range, start: State) -> Training:
        """Register a training of ``steps`` on the samples of a device, from the weights ``start``."""
        training = Training(self, share, steps, start)
        self._pending.append(training)
        return training

    def compute(self) -> None:
        """Compute all registered trainings."""
        # `groupby` groups neighbours only.
        pending = sorted(self._pending, key=_stack_key)
        self._pending = []
        for _, group in groupby(pending, key=_stack_key):
            similar = list(group)
            for start in range(0, len(similar), MAX_STACK):
                self._train_stack(similar[start : start + MAX_STACK])

    def _train_stack(self, trainings: Sequence[Training]) -> None:
        """Compute similar trainings together, and store the result of each training."""
        config = self._problem.training
        # All trainings have the same names of weights and the same steps.
        example = trainings[0]
        weights = {}
        for name in example.start:
            tensors = [training.start[name] for training in trainings]
            weights[name] = torch.stack(tensors)
        optimizer = Sgd(config.part.optimizer)
        losses = []
        for step in example.steps:
            images, labels = _stack_batches(trainings, step)
            # torch's mean loss is NaN for a batch whose labels are all ignored.
            if not all(map(config.weight, labels)):
                raise InputError(
                    "'stacked' needs a label that is not ignored in every batch: use full",
                    ("numerics",),
                )
            gradients, loss = self._gradient_step(weights, images, labels)
            optimizer.step(weights, gradients, config.settings(step))
            losses.append(loss)
        # In double precision, like the mean of Python's floats in a training that is not stacked.
        mean_losses = torch.stack(losses).double().mean(0).tolist()
        for index, training in enumerate(trainings):
            own_weights = {}
            for name, tensor in weights.items():
                own_weights[name] = tensor[index]
            training.result = (mean_losses[index], own_weights)

    @cached_property
    def _gradient_step(
        self,
    ) -> Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Function from stacked weights, samples and labels to gradients and losses; all (devices, ...)."""
        from torch.func import functional_call, grad_and_value, vmap

        model = self._problem.model
        config = self._problem.training
        module = model.build(0, len(model.units), self._problem.seed)

        def loss(
            weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor
        ) -> torch.Tensor:
            outputs = functional_call(module, weights, (images,))
            return config.loss(outputs.float(), labels, None)

        return vmap(grad_and_value(loss))


def _stack_batches(
    trainings: Sequence[Training], step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples and labels of an iteration of each training, (devices, samples, ...)."""
    images = []
    labels = []
    for training in trainings:
        # A device that trains the whole model has a single mini-batch in each iteration.
        ((own_images, own_labels),) = training.share.iteration(step)
        images.append(own_images)
        labels.append(own_labels)
    return torch.stack(images), torch.stack(labels)


def _stack_key(training: Training) -> tuple[int, int, int]:
    """Return the number of samples of a step, and start and number of steps; equal keys mean similar trainings."""
    return training.share.mini_batch, training.steps.start, len(training.steps)
