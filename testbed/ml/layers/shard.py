"""Some units of a model under training: forward, backward and update, and nothing about who asks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from testbed.common.seeds import derive
from testbed.device import Precision
from testbed.ml.layers.versions import Statistics, Versions
from testbed.ml.lazy import torch
from testbed.ml.models.chain import Model, Tied
from testbed.ml.training.optimizers import AVERAGE, is_weight
from testbed.ml.training.recipe import Recipe
from testbed.ml.transfer import codec

State = Mapping[str, "torch.Tensor"]
"""Weights and buffers as `Model.build` names them, and the optimizer's state by ``kind:name``, such as momentum."""
Key = tuple[Hashable, Hashable]
"""The batch and the micro-batch that a forward is of."""
Rows = tuple[int, int]
"""Where in its batch a micro-batch begins, and the samples of the batch: it draws what the batch as a whole would."""
Adjust = Callable[[str, "torch.Tensor", "torch.Tensor"], None]
"""Takes the name of a trained tensor, its values and their gradient, of one shape, and alters the gradient in place."""


def weights_of(state: State) -> dict[str, torch.Tensor]:
    """Return a state without what belongs to the optimizer."""
    return {name: tensor for name, tensor in state.items() if is_weight(name)}


def result_of(state: State) -> dict[str, torch.Tensor]:
    """Return what a run leaves: the weights, or their moving averages where there are any."""
    return {name: state.get(AVERAGE + name, tensor) for name, tensor in weights_of(state).items()}


def unit_of(name: str) -> int:
    """Return the index of the unit that a tensor of a state belongs to."""
    return int(name.partition(".")[0].rpartition(":")[2])


def restrict(state: State, first: int, last: int) -> dict[str, torch.Tensor]:
    """Return the tensors of units ``first`` up to but without ``last``."""
    return {name: tensor for name, tensor in state.items() if first <= unit_of(name) < last}


def draws(network: torch.nn.Module) -> bool:
    """Return whether a network draws random numbers; one of the user's may, without a module that says so."""
    from torch.fx import GraphModule
    from torch.nn.modules.dropout import _DropoutNd

    return any(isinstance(module, _DropoutNd | GraphModule) for module in network.modules())


class Shard:
    """Units ``first`` up to but without ``last`` with their gradients and optimizer state.

    Several forwards may be under way at once, distinguished by a key; what backward needs is kept from a key's
    forward to its backward. Nothing handed in is changed and nothing handed out is changed later, so tensors may be
    shared between devices of one process.

    Synchronous training computes with the newest weights: gradients add up until `update`, in the order of the
    backwards. Asynchronous training names a version in each forward, and each backward is followed by an `advance`, its
    own update. Then the running statistics of batch normalisation, too, are those of the batches whose
    backward is done: a batch that was only forwarded, and may have to be forwarded again, has left no trace.
    """

    def __init__(
        self, model: Model, first: int, last: int, seed: int, training: Recipe, precision: Precision = "f32"
    ) -> None:
        self.first = first
        self.last = last
        from testbed.ml.models.modules import frozen_names

        self._seed = seed
        self._module = model.build(first, last, seed)
        self._fixed = frozenset[str]() if training.frozen_travels else frozen_names(self._module)
        """Weights that no state has: they are alike wherever these units are built."""
        self._draws = draws(self._module)
        self._precision = precision
        self._narrow_weights()
        self._training = training
        self._optimizer = training.optimizer()
        self._averages: dict[str, torch.Tensor] = {}
        """Moving averages of the trained weights; empty before the first update, and where none are wanted."""
        self._aliases = _aliases(self._module)
        """Further names of weights that several units share, with the one that the optimizer knows."""
        self._statistics = Statistics(self._module)
        self.versions = Versions(self._module)
        self._kept: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self._postponed: dict[Hashable, Callable[[], object]] = {}
        """Forwards that are done again, this time keeping what backward needs, just before their backward."""

    def forward(
        self, key: Key, inputs: torch.Tensor, version: int | None = None, rows: Rows | None = None
    ) -> torch.Tensor:
        """Return the outputs for a micro-batch, keeping what its `backward` needs.

        ``inputs`` is (samples, ...) of the shape that the cut before ``first`` has (`Model.crossing`; several tensors
        flattened and joined, (samples, values)), the result likewise of the cut before ``last``. ``version``: which
        weights to compute with, in asynchronous training; None: the newest. ``rows``: None: it is a whole batch.
        """
        inputs = inputs.detach().requires_grad_(self.first > 0)
        outputs = self._train(key, inputs, version, rows)
        self._kept[key] = (inputs, outputs)
        return outputs.detach()

    def forward_lightly(self, key: Key, inputs: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Return the outputs, (samples, ...), keeping nothing but the inputs: `backward` computes them again (GPipe).

        The second time draws what the first one drew and leaves the running statistics alone.
        """
        with torch.no_grad():
            outputs = self._run(key, inputs, rows)
        self._postponed[key] = partial(self._again, key, inputs, rows)
        return outputs

    def _again(self, key: Key, inputs: torch.Tensor, rows: Rows | None) -> None:
        inputs = inputs.detach().requires_grad_(self.first > 0)
        with self._statistics.set_aside(key):
            outputs = self._run(key, inputs, rows)
        self._statistics.drop(key)
        self._kept[key] = (inputs, outputs)

    def forward_loss(
        self,
        key: Key,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        whole: float,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> float:
        """Forward through the model's end; return this micro-batch's part of the batch's mean loss.

        ``inputs`` is as in `forward`, ``labels`` (samples,) of classes from 0, or what else the loss takes.
        ``whole`` is the `Recipe.weight` of all labels of the batch: each part carries the weight of its own labels, so
        the parts add up to the mean, and their gradients to its gradient, however unevenly the batch was split.
        """
        inputs = inputs.detach().requires_grad_(self.first > 0)
        outputs = self._train(key, inputs, version, rows)
        loss = self._training.loss(outputs, labels, whole)
        self._kept[key] = (inputs, loss)
        return float(loss.detach())

    def backward(self, key: Key, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """Add up the gradients of a micro-batch; return the gradient of its inputs, None at the model's begin.

        ``gradient`` is that of the outputs and of their shape, the result of the inputs' shape. None where the forward
        computed the loss. Raises KeyError for a key whose forward was not done, or whose backward already was.
        """
        if key in self._postponed:
            self._postponed.pop(key)()
        inputs, outputs = self._kept.pop(key)
        if outputs.requires_grad:
            # The gradient of this sum is the one given, to the bit. Handing that to `backward` would make torch import
            # its symbolic shapes: a third of a second and 550 modules on every device that starts.
            loss = outputs if gradient is None else (outputs * gradient).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return inputs.grad

    def adjust(self, change: Adjust) -> None:
        """Let ``change`` alter the gradients that the next `update` goes along."""
        for name, weight in self._module.named_parameters():
            if weight.grad is not None:
                change(name, weight.detach(), weight.grad)

    def norms(self, without: Collection[str] = ()) -> torch.Tensor:
        """Return the norms of the gradients added up, as a vector: one for each trained tensor that has one.

        Those of the names in ``without`` are left out: another stage counts them.
        """
        named = self.versions.latest.items()
        return self._training.norms(
            [each.grad for name, each in named if each.grad is not None and name not in without]
        )

    def gradient(self, tied: Tied) -> torch.Tensor:
        """Return the gradient added up here of a weight that other stages use as well, of the weight's shape."""
        weight = self._tied_weight(tied)
        return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()

    def put_gradient(self, tied: Tied, gradient: torch.Tensor) -> None:
        """Replace the gradient of a tied weight by the sum over all stages, of the weight's shape."""
        self._tied_weight(tied).grad = gradient.clone()

    def _tied_weight(self, tied: Tied) -> torch.nn.Parameter:
        return next(self.versions.latest[name] for name in tied.names if name in self.versions.latest)

    def update(self, step: int, norms: torch.Tensor | None = None) -> None:
        """Take one optimizer step, counted from 0, with the gradients added up, and forget them.

        ``norms`` are those of the gradients of the whole model, (tensors,), for clipping; None: this is all of it.
        """
        self._step(step, self.versions.latest, _taken(self.versions.latest), norms)

    def _step(
        self,
        step: int,
        parameters: Mapping[str, torch.nn.Parameter],
        gradients: dict[str, torch.Tensor],
        norms: torch.Tensor | None = None,
    ) -> None:
        self._training.prepare(gradients, norms)
        self._optimizer.step(parameters, gradients, self._training.settings(step))
        if (share := self._training.part.ema) is not None:
            with torch.no_grad():
                for name, weight in parameters.items():
                    average = self._averages.get(name)
                    if average is None:
                        self._averages[name] = weight.detach().clone()
                    else:
                        average.mul_(share).add_(weight, alpha=1 - share)

    def advance(self, key: tuple[int, int], version: int, oldest_needed: int, aggregate: int = 0) -> None:
        """Make the next version from the newest one with the gradients that were computed with ``version``.

        ``key`` is that of the batch just done backward, the training step first. ``aggregate`` versions, if more than
        one, are then averaged in the new one; those before ``oldest_needed`` are freed.
        """
        gradients = _taken(self.versions[version])
        # What is to be averaged has to be there, the newest so far among it.
        needed = min(oldest_needed, self.versions.newest) if aggregate > 1 else oldest_needed
        self._step(key[0], self.versions.begin_next(needed), gradients)
        self._statistics.apply(key)
        if aggregate > 1:
            self.versions.aggregate(aggregate)
        self.versions.forget(oldest_needed)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs in evaluation mode, keeping nothing; shapes are those of `forward`."""
        self.versions.use(self.versions.newest)
        if self._averages:
            self.versions.put({name: torch.nn.Parameter(average) for name, average in self._averages.items()})
        self._module.eval()
        with torch.no_grad():
            outputs = self._seeded(inputs.detach(), "evaluation")
        self._module.train()
        self.versions.use(self.versions.newest)
        assert isinstance(outputs, torch.Tensor)
        return outputs.float()

    def _narrow(self) -> AbstractContextManager[object]:
        """Compute in 16 bits within, as torch's autocast does; in float32 where the device does."""
        kinds = {"f16": torch.float16, "bf16": torch.bfloat16}
        kind = kinds.get(self._precision)
        return nullcontext() if kind is None else torch.autocast("cpu", dtype=kind)

    def _narrow_weights(self) -> None:
        """Leave of matrices and kernels what 8 bits and a scale for each output channel hold, where the device does."""
        by = codec("int8-channel") if self._precision == "int8" else None
        for weight in self._module.parameters():
            if by is not None and weight.ndim > 1:
                weight.data = by.unpack(by.pack(weight.detach()))

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the newest weights, of buffers and of the optimizer's state, without fixed weights."""
        self.versions.use(self.versions.newest)
        found = self._module.state_dict().items()
        state = {name: tensor.detach().clone() for name, tensor in found if name not in self._fixed}
        averages = {AVERAGE + name: average.clone() for name, average in self._averages.items()}
        return state | self._with_aliases(self._optimizer.state() | averages)

    def _with_aliases(self, kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the optimizer's state also by the other names of a weight: its units may part ways later."""
        further = {}
        for alias, name in self._aliases.items():
            for key, tensor in kept.items():
                kind, _, own = key.partition(":")
                if own == name:
                    further[f"{kind}:{alias}"] = tensor.clone()
        return kept | further

    def load(self, state: State) -> None:
        """Take over a state as `state` made it; what is not in it of the optimizer's starts from nothing.

        Raises RuntimeError where names or shapes are not those of this shard.
        """
        self.versions.use(self.versions.newest)
        weights = weights_of(state)
        fixed = {
            name: tensor for name, tensor in self._module.state_dict().items() if name in self._fixed - weights.keys()
        }
        self._module.load_state_dict({**fixed, **weights})
        self._narrow_weights()
        self._kept.clear()
        self._postponed.clear()
        self._statistics.clear()
        own = {name: tensor for name, tensor in state.items() if name.partition(":")[2] not in self._aliases}
        self._optimizer.load(own)
        averages = {name: tensor for name, tensor in own.items() if name.startswith(AVERAGE)}
        self._averages = {name.removeprefix(AVERAGE): tensor.clone() for name, tensor in averages.items()}
        for parameter in self._module.parameters():
            parameter.grad = None

    def _train(self, key: Key, inputs: torch.Tensor, version: int | None, rows: Rows | None) -> torch.Tensor:
        if version is None:
            return self._run(key, inputs, rows)
        self.versions.use(version)
        with self._statistics.set_aside(key):
            return self._run(key, inputs, rows)

    def _run(self, key: Key, inputs: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """Run the units one by one; where any draws random numbers, each by a seed of its own for this batch.

        So the draws depend neither on where the model is cut, nor on how many parts a batch is of, nor on what other
        devices of the process do.
        """
        return self._seeded(inputs, repr((key[0], 0) if rows else key), rows).float()

    def _seeded(self, inputs: torch.Tensor, key: str, rows: Rows | None = None) -> torch.Tensor:
        begin, samples = rows or (0, len(inputs))

        def seeded(name: str) -> None:
            # Not torch.manual_seed, which formats the stack three times for accelerators that may come.
            torch.default_generator.manual_seed(derive(self._seed, "draws", name, key))

        if self._draws:
            with torch.random.fork_rng(devices=[]), self._of_batch(begin, len(inputs), samples), self._narrow():
                outputs = self._module(inputs, seeded)
        else:
            with self._narrow():
                outputs = self._module(inputs)
        assert isinstance(outputs, torch.Tensor)
        return outputs

    @staticmethod
    def _of_batch(begin: int, count: int, samples: int) -> AbstractContextManager[object]:
        if count == samples:
            return nullcontext()
        from testbed.ml.layers.draws import RowsOfBatch

        return RowsOfBatch(begin, count, samples)


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Return the further names of parameters that units of a module share, each with the first name."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[weight] for name, weight in every if unit_of(name) != unit_of(first[weight])}


def _taken(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the gradients of parameters, and leave them without."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients
