"""Local training of many devices in one computation: stacked weights and samples, by torch's ``vmap``.

On the virtual clock a device's training is charged as usual. The numbers are computed when the first device needs its
result: all similar trainings started by then are computed together. The gain is largest for small networks, whose
operations cost more than their arithmetic. In containers a device is alone and trains by ``numerics: full``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from testbed.common.errors import InputError
from testbed.ml.layers.shard import State, draws
from testbed.ml.lazy import torch
from testbed.ml.method import Problem
from testbed.ml.rounds.layers import LocalDataset
from testbed.ml.training.optimizers import Sgd

TOGETHER = 256
"""Maximum devices computed together: more would gain nothing and take memory."""


@dataclass(eq=False)
class Training:
    """One device's round, computed on demand, or earlier together with others."""

    stack: Stack
    share: LocalDataset
    steps: range
    start: State
    result: tuple[float, State] | None = None
    """The mean loss and the new weights."""

    def finish(self) -> tuple[float, State]:
        """Return the result."""
        if self.result is None:
            self.stack.compute()
        assert self.result is not None
        return self.result


def check(problem: Problem, plain: bool) -> None:
    """Raise `InputError` for configurations without stacking support; ``plain``: rounds consist of descent steps."""
    training, key = problem.workload.training, ("numerics",)
    optimizer = training.optimizer
    reasons = {
        "local training of the method's own": not plain,
        "an optimizer other than sgd, or momentum": not optimizer.plain
        or optimizer.momentum,
        "clipping": training.clip,
        "a precision other than f32": any(
            device.precision != "f32" for device in problem.devices
        ),
    }
    module = problem.model.build(0, len(problem.model.units), problem.seed)
    reasons["running statistics, as of batch normalisation"] = any(
        True for _ in module.buffers()
    )
    reasons["weights that several layers share"] = bool(problem.model.tied)
    reasons["layers that may draw, such as dropout"] = draws(module)
    reasons["a smaller last batch"] = not problem.workload.drop_last
    reasons["weights that are not trained"] = problem.model.frozen
    if unsupported := [reason for reason, there in reasons.items() if there]:
        raise InputError(
            f"'stacked' does not support {' and '.join(unsupported)}: use full", key
        )


class Stack:
    """The trainings of a run without a requested result."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._begun: list[Training] = []

    def begin(self, share: LocalDataset, steps: range, start: State) -> Training:
        """Register a device's training of some steps on its samples, from given weights."""
        training = Training(self, share, steps, start)
        self._begun.append(training)
        return training

    def compute(self) -> None:
        """Compute all registered trainings."""
        begun, self._begun = sorted(self._begun, key=_stack_key), []
        for _, alike in groupby(begun, key=_stack_key):
            some = list(alike)
            for first in range(0, len(some), TOGETHER):
                self._train_stack(some[first : first + TOGETHER])

    def _train_stack(self, trainings: Sequence[Training]) -> None:
        training, first = self._problem.training, trainings[0]
        weights = {
            name: torch.stack([each.start[name] for each in trainings])
            for name in first.start
        }
        optimizer, losses = Sgd(training.part.optimizer), []
        for place, step in enumerate(first.steps):
            batches = zip(
                *(each.share.iteration(each.steps[place])[0] for each in trainings),
                strict=True,
            )
            images, labels = (torch.stack(parts) for parts in batches)
            if not all(map(training.weight, labels)):
                raise InputError(
                    "'stacked' needs a counted label in every batch: use full",
                    ("numerics",),
                )
            gradients, loss = self._gradient_step(weights, images, labels)
            optimizer.step(weights, gradients, training.settings(step))
            losses.append(loss)
        means = torch.stack(losses).double().mean(0).tolist()
        for number, (each, mean) in enumerate(zip(trainings, means, strict=True)):
            each.result = (
                mean,
                {name: tensor[number] for name, tensor in weights.items()},
            )

    @cached_property
    def _gradient_step(
        self,
    ) -> Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """A step on stacked weights, images and labels, (devices, ...); returns gradients and losses,
        (devices, ...).
        """
        from torch.func import functional_call, grad_and_value, vmap

        model, recipe = self._problem.model, self._problem.training
        module = model.build(0, len(model.units), self._problem.seed)

        def loss(
            weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor
        ) -> torch.Tensor:
            return recipe.loss(
                functional_call(module, weights, (images,)).float(), labels, None
            )

        return vmap(grad_and_value(loss))


def _stack_key(training: Training) -> tuple[int, int, int]:
    """Return the key of trainings that can be stacked: the samples of a step, and the steps."""
    return training.share.mini_batch, training.steps.start, len(training.steps)
