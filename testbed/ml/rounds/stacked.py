"""Local training of many devices in one computation: stacked weights and samples, by torch's ``vmap``.

On the virtual clock a device's training is charged as usual. The numbers are computed when the first device needs the
result of its training: all similar trainings started by then are computed together. The gain is largest for small
networks, for which calling an operation takes longer than its arithmetic. In containers a device is alone and trains by
``numerics: full``.
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

TOGETHER = 256
"""Maximum number of devices computed together: more would gain nothing and take memory."""


@dataclass(eq=False)
class Training:
    """One device's training in a round, computed on demand, or earlier together with others."""

    stack: Stack
    share: LocalDataset
    steps: range
    start: State
    result: tuple[float, State] | None = None
    """The mean loss and the new weights."""

    def finish(self) -> tuple[float, State]:
        """Return the mean loss and the new weights; compute all registered trainings if this one is not done."""
        if self.result is None:
            self.stack.compute()
        assert self.result is not None
        return self.result


def check_support(problem: PlanningProblem, *, trains_plainly: bool) -> None:
    """Raise `InputError` for configurations without stacking support.

    ``trains_plainly``: a round consists of an optimizer's steps, without changes by the method.
    """
    training = problem.workload.training
    optimizer = training.optimizer
    model = problem.model
    module = model.build(0, len(model.units), problem.seed)
    has_other_optimizer = not optimizer.is_plain or optimizer.momentum
    has_other_precision = any(device.precision != "f32" for device in problem.devices)
    # Each reason with a value that is true if the reason applies.
    reasons = {
        "local training of the method's own": not trains_plainly,
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
    """All trainings of a run whose results are not computed yet."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._begun: list[Training] = []

    def begin(self, share: LocalDataset, steps: range, start: State) -> Training:
        """Register a training of some steps on the samples of a device, from the weights ``start``."""
        training = Training(self, share, steps, start)
        self._begun.append(training)
        return training

    def compute(self) -> None:
        """Compute all registered trainings."""
        # groupby needs equal keys to be neighbours.
        begun = sorted(self._begun, key=_stack_key)
        self._begun = []
        for _, group in groupby(begun, key=_stack_key):
            similar = list(group)
            for first in range(0, len(similar), TOGETHER):
                self._train_stack(similar[first : first + TOGETHER])

    def _train_stack(self, trainings: Sequence[Training]) -> None:
        """Compute similar trainings together, and store each one's result."""
        config = self._problem.training
        first = trainings[0]
        weights = {}
        for name in first.start:
            tensors = [training.start[name] for training in trainings]
            weights[name] = torch.stack(tensors)
        optimizer = Sgd(config.part.optimizer)
        losses = []
        for place, step in enumerate(first.steps):
            images, labels = _stack_batches(trainings, place)
            # Without a counted label, torch's mean loss is not a number.
            if not all(map(config.weight, labels)):
                raise InputError(
                    "'stacked' needs a counted label in every batch: use full",
                    ("numerics",),
                )
            gradients, loss = self._gradient_step(weights, images, labels)
            optimizer.step(weights, gradients, config.settings(step))
            losses.append(loss)
        # In double precision, as the mean of Python floats in a training that is not stacked.
        means = torch.stack(losses).double().mean(0).tolist()
        for number, training in enumerate(trainings):
            own = {}
            for name, tensor in weights.items():
                own[name] = tensor[number]
            training.result = (means[number], own)

    @cached_property
    def _gradient_step(
        self,
    ) -> Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Function of stacked weights, images and labels that returns gradients and losses; all (devices, ...)."""
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
    trainings: Sequence[Training], place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of each training's step at a place, (devices, samples, ...)."""
    images = []
    labels = []
    for training in trainings:
        mini_batches = training.share.iteration(training.steps[place])
        own_images, own_labels = mini_batches[0]
        images.append(own_images)
        labels.append(own_labels)
    return torch.stack(images), torch.stack(labels)


def _stack_key(training: Training) -> tuple[int, int, int]:
    """Return the samples of a step, and the steps: trainings with equal keys can be stacked."""
    return training.share.mini_batch, training.steps.start, len(training.steps)
