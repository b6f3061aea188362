"""Units of a model under training: forward, backward and update.

A `Shard` serves as a stage of a pipeline, as the layers of a device in federated or split learning, and as the whole
model of a device that trains alone. A shard sends no messages and takes no time on the device: its callers charge each
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from testbed.common.seeds import derive
from testbed.device import Precision
from testbed.ml.layers.versions import Statistics, Versions
from testbed.ml.lazy import torch
from testbed.ml.models.chain import Model, TiedWeight
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.optimizers import AVERAGE, is_weight
from testbed.ml.transfer import make_codec

State = Mapping[str, "torch.Tensor"]
"""Weights and buffers as `Model.build` names them, and the optimizer's state by ``kind:name``, such as momentum."""
Key = tuple[Hashable, Hashable]
"""Identifies a forward: its batch (often the training step) and its micro-batch."""
Rows = tuple[int, int]
"""Place of a micro-batch in its batch: the index of its first sample, and the number of samples of the batch. Random
numbers are drawn for the whole batch, so the micro-batch has to find its own rows."""
Adjust = Callable[[str, "torch.Tensor", "torch.Tensor"], None]
"""Modifies a gradient in place; arguments are name, values and gradient of a trained tensor, both of one shape."""


def weights_of(state: State) -> dict[str, torch.Tensor]:
    """Return a state without the tensors of the optimizer.

    >>> sorted(weights_of({"0.weight": torch.ones(1), "momentum:0.weight": torch.ones(1)}))
    ['0.weight']
    """
    weights = {}
    for name, tensor in state.items():
        if is_weight(name):
            weights[name] = tensor
    return weights


def result_of(state: State) -> dict[str, torch.Tensor]:
    """Return the final weights of a run: moving averages of the weights if configured, otherwise the weights."""
    result = {}
    for name, tensor in weights_of(state).items():
        # Frozen weights and running statistics have no average.
        result[name] = state.get(AVERAGE + name, tensor)
    return result


def unit_of(name: str) -> int:
    """Return the unit index of a tensor name.

    >>> unit_of("3.0.weight"), unit_of("momentum:3.0.weight")
    (3, 3)
    """
    kind_and_unit, _, _ = name.partition(".")
    _, _, unit = kind_and_unit.rpartition(":")
    return int(unit)


def restrict(state: State, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the tensors of units ``start`` to ``stop`` (exclusive), including the optimizer's tensors.

    >>> state = {"0.weight": torch.ones(1), "1.weight": torch.ones(1), "momentum:1.weight": torch.ones(1)}
    >>> list(restrict(state, 1, 2))
    ['1.weight', 'momentum:1.weight']
    """
    tensors = {}
    for name, tensor in state.items():
        if start <= unit_of(name) < stop:
            tensors[name] = tensor
    return tensors


def has_random_numbers(network: torch.nn.Module) -> bool:
    """Return whether a network may draw random numbers."""
    from torch.fx import GraphModule
    from torch.nn.modules.dropout import _DropoutNd

    # The graph of a user's network may call random functions without any module for them.
    random_types = (_DropoutNd, GraphModule)
    return any(isinstance(module, random_types) for module in network.modules())


class Shard:
    """Units ``start`` to ``stop`` (exclusive) with their gradients and optimizer state.

    Several forwards may wait for their backwards at once, distinguished by a `Key`; the intermediate values of a key
    are kept from its forward to its backward. Tensors passed to or returned by a shard are never modified later, so
    devices of one process may share them.

    Synchronous training computes with the newest weights: gradients accumulate until `update`, in the order of the
    backwards. Asynchronous training selects a version of the weights in each forward and calls `advance` after each
    backward, which updates the weights with the gradients of this backward alone. Running statistics of batch
    normalisation then include only batches whose backward is done, so that a forward repeated after a failure is not
    counted twice.

    >>> from testbed.ml.models import create
    >>> shard = Shard(create("mlp", {"hidden": [8]}, (1, 4, 4), 10), 0, 2, seed=1, training=TrainingConfig())
    >>> samples, labels = torch.zeros(3, 1, 4, 4), torch.tensor([0, 1, 2])
    >>> loss = shard.forward_loss((0, 0), samples, labels, total_weight=3.0)
    >>> round(loss, 3)
    2.303
    >>> shard.backward((0, 0))
    >>> shard.update(step=0)
    >>> shard.infer(samples).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        model: Model,
        start: int,
        stop: int,
        seed: int,
        training: TrainingConfig,
        precision: Precision = "f32",
    ) -> None:
        from testbed.ml.models.modules import frozen_names

        self.start = start
        self.stop = stop
        self._seed = seed
        self._module = model.build(start, stop, seed)
        self._omitted_names = frozenset[str]()
        """Names of frozen weights excluded from states, because every build of these units has the same values."""
        if not training.frozen_travels:
            self._omitted_names = frozen_names(self._module)
        self._has_random_numbers = has_random_numbers(self._module)
        self._precision = precision
        self._quantise_weights()
        self._training = training
        self._optimizer = training.optimizer()
        self._averages: dict[str, torch.Tensor] = {}
        """Moving averages of the trained weights; empty before the first update, and if not requested."""
        self._aliases = _aliases(self._module)
        """Weights that several units share: each further name, with the name under which the optimizer knows them."""
        self._statistics = Statistics(self._module)
        self.versions = Versions(self._module)
        self._forwards: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        """Forwards that wait for their backward: inputs, and outputs or loss."""
        self._repetitions: dict[Hashable, Callable[[], object]] = {}
        """Functions that repeat a forward of `forward_lightly` just before its backward."""

    def forward(
        self,
        key: Key,
        inputs: torch.Tensor,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> torch.Tensor:
        """Return the outputs of a micro-batch, keeping the intermediate values for the `backward` of the same key.

        ``inputs`` is (samples, ...) with the shape of the cut before ``start``, and the result has the shape of the cut
        before ``stop`` (see `Model.crossing_tensors`). If several tensors cross a cut, each sample's tensors are
        flattened and joined, (samples, values). ``version`` is the number of the weights in asynchronous training; None
        means the newest weights in synchronous training. ``rows`` is None for a whole batch.
        """
        inputs = self._as_leaf(inputs)
        outputs = self._forward_training(key, inputs, version, rows)
        self._forwards[key] = (inputs, outputs)
        return outputs.detach()

    def forward_lightly(
        self, key: Key, inputs: torch.Tensor, rows: Rows | None = None
    ) -> torch.Tensor:
        """Return the outputs, (samples, ...), keeping only the inputs: `backward` repeats the forward (GPipe).

        The repetition draws the same random numbers and leaves the running statistics unchanged.
        """
        with torch.no_grad():
            outputs = self._run_batch(key, inputs, rows)
        self._repetitions[key] = partial(self._repeat_forward, key, inputs, rows)
        return outputs

    def _repeat_forward(
        self, key: Key, inputs: torch.Tensor, rows: Rows | None
    ) -> None:
        inputs = self._as_leaf(inputs)
        with self._statistics.set_aside(key):
            outputs = self._run_batch(key, inputs, rows)
        # The first forward has added this batch to the running statistics already.
        self._statistics.drop(key)
        self._forwards[key] = (inputs, outputs)

    def _as_leaf(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs as a leaf of autograd's graph, which receives a gradient if the backward returns one."""
        # Nobody needs the gradient of the samples, which enter unit 0.
        return inputs.detach().requires_grad_(self.start > 0)

    def forward_loss(
        self,
        key: Key,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        total_weight: float,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> float:
        """Run a micro-batch through the last units of the model; return the micro-batch's part of the mean batch loss.

        ``inputs``, ``version`` and ``rows`` are as in `forward`; ``labels`` is (samples,) of classes from 0, or another
        shape the loss accepts. ``total_weight`` is the `TrainingConfig.weight` of all labels of the batch. Each
        micro-batch counts by the weight of its own labels, so the parts sum to the mean loss, and their gradients to
        the gradient of the mean loss, however the batch is split.
        """
        inputs = self._as_leaf(inputs)
        outputs = self._forward_training(key, inputs, version, rows)
        loss = self._training.loss(outputs, labels, total_weight)
        self._forwards[key] = (inputs, loss)
        return float(loss.detach())

    def backward(
        self, key: Key, gradient: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Accumulate the gradients of a micro-batch; return the gradient of the inputs, None at the model's beginning.

        ``gradient`` is the gradient of the outputs, with their shape; the result has the shape of the inputs.
        ``gradient`` is None if the forward computed the loss. Raises KeyError for a key without a forward, or with a
        backward already done.
        """
        if key in self._repetitions:
            repeat_forward = self._repetitions.pop(key)
            repeat_forward()
        inputs, outputs = self._forwards.pop(key)
        # Outputs that depend on frozen weights and samples alone have no gradient.
        if outputs.requires_grad:
            loss = outputs
            if gradient is not None:
                # The outputs' gradient by this sum is ``gradient``, to the bit. Passing ``gradient`` to `backward`
                # would make torch import its symbolic shapes: a third of a second and 550 modules on every device that
                # starts.
                loss = (outputs * gradient).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return inputs.grad

    def adjust(self, change: Adjust) -> None:
        """Apply ``change`` to the gradients of the next `update`."""
        for name, weight in self._module.named_parameters():
            if weight.grad is not None:
                change(name, weight.detach(), weight.grad)

    def norms(self, excluded: Collection[str] = ()) -> torch.Tensor:
        """Return the norms of the accumulated gradients, (tensors,): one for each trained tensor with a gradient.

        ``excluded`` names shared tensors that another stage counts.
        """
        gradients = []
        for name, weight in self.versions.newest_parameters.items():
            if weight.grad is not None and name not in excluded:
                gradients.append(weight.grad)
        return self._training.norms(gradients)

    def gradient(self, tied: TiedWeight) -> torch.Tensor:
        """Return the accumulated gradient of a weight shared with other stages, in the shape of the weight."""
        weight = self._tied_weight(tied)
        if weight.grad is None:
            return torch.zeros_like(weight)
        return weight.grad.clone()

    def put_gradient(self, tied: TiedWeight, gradient: torch.Tensor) -> None:
        """Replace the gradient of a shared weight by ``gradient``, the sum over all stages."""
        self._tied_weight(tied).grad = gradient.clone()

    def _tied_weight(self, tied: TiedWeight) -> torch.nn.Parameter:
        """Return a shared weight by any of the weight's names: units of the shard may use only the second one."""
        parameters = self.versions.newest_parameters
        for name in tied.names:
            if name in parameters:
                return parameters[name]
        raise KeyError(f"units {self.start} to {self.stop - 1} do not use {tied.title}")

    def update(self, step: int, norms: torch.Tensor | None = None) -> None:
        """Take optimizer step ``step``, counted from 0, with the accumulated gradients, and reset the gradients.

        ``norms`` are the gradient norms of the whole model, (tensors,), for clipping; None if this shard is the whole
        model.
        """
        parameters = self.versions.newest_parameters
        gradients = _take_gradients(parameters)
        self._step_optimizer(step, parameters, gradients, norms)

    def _step_optimizer(
        self,
        step: int,
        parameters: Mapping[str, torch.nn.Parameter],
        gradients: dict[str, torch.Tensor],
        norms: torch.Tensor | None = None,
    ) -> None:
        self._training.clip_gradients(gradients, norms)
        settings = self._training.settings(step)
        self._optimizer.step(parameters, gradients, settings)
        self._update_averages(parameters)

    def _update_averages(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Update the moving averages by the weights after a step, if the workload asks for averages."""
        decay = self._training.part.ema
        if decay is None:
            return
        with torch.no_grad():
            for name, weight in parameters.items():
                average = self._averages.get(name)
                if average is None:
                    # The average begins with the weights after the first step, as in torch.optim.swa_utils.
                    self._averages[name] = weight.detach().clone()
                else:
                    average.mul_(decay)
                    average.add_(weight, alpha=1 - decay)

    def advance(
        self,
        key: tuple[int, int],
        version: int,
        oldest_needed: int,
        aggregate: int = 0,
    ) -> None:
        """Make the next version: the newest version, updated by the gradients computed with ``version``.

        ``key`` is the key of the batch whose backward was just done: training step and micro-batch. If ``aggregate``
        exceeds one, the new version is replaced by the mean of ``aggregate`` versions: itself and the ones before it.
        Versions before ``oldest_needed`` are freed.
        """
        gradients = _take_gradients(self.versions[version])
        needed = oldest_needed
        if aggregate > 1:
            # The mean includes the newest version, so it must not be changed in place.
            needed = min(oldest_needed, self.versions.newest)
        following = self.versions.begin_next(needed)
        step, _ = key
        self._step_optimizer(step, following, gradients)
        self._statistics.apply(key)
        if aggregate > 1:
            self.versions.aggregate(aggregate)
        self.versions.forget(oldest_needed)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs in evaluation mode, with averaged weights if configured; shapes as in `forward`."""
        # A forward in training may have left the module with an older version.
        self.versions.use(self.versions.newest)
        if self._averages:
            averages = {}
            for name, average in self._averages.items():
                averages[name] = torch.nn.Parameter(average)
            self.versions.use_parameters(averages)
        self._module.eval()
        with torch.no_grad():
            outputs = self._run_seeded(inputs.detach(), "evaluation")
        self._module.train()
        # Training continues with the weights, not with their averages.
        self.versions.use(self.versions.newest)
        assert isinstance(outputs, torch.Tensor)
        return outputs.float()

    def _autocast(self) -> AbstractContextManager[object]:
        """Context in which torch's autocast computes in 16 bits, if configured as the device's precision."""
        dtypes = {"f16": torch.float16, "bf16": torch.bfloat16}
        dtype = dtypes.get(self._precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=dtype)

    def _quantise_weights(self) -> None:
        """Quantise matrices and kernels to 8 bits with a scale for each output channel, if the device computes so."""
        if self._precision != "int8":
            return
        quantisation = make_codec("int8-channel")
        assert quantisation is not None
        for weight in self._module.parameters():
            # Biases and normalisations, which have one axis, are not quantised.
            if weight.ndim > 1:
                # The rounded values are stored as floats, since torch's kernels for training reject integers.
                packed = quantisation.pack(weight.detach())
                weight.data = quantisation.unpack(packed)

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the newest weights, the buffers and the optimizer's state.

        Frozen weights are omitted unless `TrainingConfig.frozen_travels`.
        """
        self.versions.use(self.versions.newest)
        state = {}
        for name, tensor in self._module.state_dict().items():
            if name not in self._omitted_names:
                state[name] = tensor.detach().clone()
        optimizer_state = self._optimizer.state()
        for name, average in self._averages.items():
            optimizer_state[AVERAGE + name] = average.clone()
        return state | self._with_aliases(optimizer_state)

    def _with_aliases(
        self, optimizer_state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the optimizer's state with an entry for each name of a shared weight.

        The units that share a weight may become parts of different stages later, and each stage then needs the entry.
        """
        aliased = {}
        for alias, name in self._aliases.items():
            for key, tensor in optimizer_state.items():
                kind, _, parameter_name = key.partition(":")
                if parameter_name == name:
                    aliased[f"{kind}:{alias}"] = tensor.clone()
        return optimizer_state | aliased

    def load(self, state: State) -> None:
        """Restore a state returned by `state`; missing optimizer tensors start from zero.

        Raises RuntimeError for names or shapes other than this shard's.
        """
        self.versions.use(self.versions.newest)
        weights = weights_of(state)
        for name, tensor in self._module.state_dict().items():
            # States lack the frozen weights, but `load_state_dict` asks for every tensor.
            if name in self._omitted_names and name not in weights:
                weights[name] = tensor
        self._module.load_state_dict(weights)
        self._quantise_weights()
        # Batches whose backward is missing are repeated after a restart.
        self._forwards.clear()
        self._repetitions.clear()
        self._statistics.clear()
        without_aliases = {}
        for name, tensor in state.items():
            # The optimizer knows a shared weight by one name: the entries of `_with_aliases` are left out.
            _, _, parameter_name = name.partition(":")
            if parameter_name not in self._aliases:
                without_aliases[name] = tensor
        self._optimizer.load(without_aliases)
        self._averages = {}
        for name, tensor in without_aliases.items():
            if name.startswith(AVERAGE):
                self._averages[name.removeprefix(AVERAGE)] = tensor.clone()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _forward_training(
        self, key: Key, inputs: torch.Tensor, version: int | None, rows: Rows | None
    ) -> torch.Tensor:
        if version is None:
            return self._run_batch(key, inputs, rows)
        self.versions.use(version)
        with self._statistics.set_aside(key):
            return self._run_batch(key, inputs, rows)

    def _run_batch(
        self, key: Key, inputs: torch.Tensor, rows: Rows | None
    ) -> torch.Tensor:
        """Run the units in order; if any unit draws random numbers, seed every unit by name and batch.

        The draws are therefore independent of the cuts, of the number of micro-batches, and of other devices in the
        process.
        """
        # All micro-batches of a batch draw the numbers of the whole batch, and use their own rows.
        seed_key = (key[0], 0) if rows else key
        outputs = self._run_seeded(inputs, repr(seed_key), rows)
        # Autocast may have computed 16 bits; messages and losses are float32.
        return outputs.float()

    def _run_seeded(
        self, inputs: torch.Tensor, seed_name: str, rows: Rows | None = None
    ) -> torch.Tensor:
        first_row, batch_samples = rows or (0, len(inputs))

        def seed_unit(name: str) -> None:
            seed = derive(self._seed, "draws", name, seed_name)
            # torch.manual_seed would also format the stack three times, to seed accelerators later.
            torch.default_generator.manual_seed(seed)

        if self._has_random_numbers:
            with (
                torch.random.fork_rng(devices=[]),
                _rows_of_batch(first_row, len(inputs), batch_samples),
                self._autocast(),
            ):
                outputs = self._module(inputs, seed_unit)
        else:
            with self._autocast():
                outputs = self._module(inputs)
        assert isinstance(outputs, torch.Tensor)
        return outputs


def _rows_of_batch(
    first_row: int, count: int, batch_samples: int
) -> AbstractContextManager[object]:
    """Context in which ``count`` rows receive the same random numbers as in the batch of ``batch_samples``."""
    if count == batch_samples:
        return nullcontext()
    # Imported here because it imports torch, which planning with the rest of this module does not need.
    from testbed.ml.layers.draws import RowsOfBatch

    return RowsOfBatch(first_row, count, batch_samples)


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Return each additional name of a parameter shared by several units, with the parameter's first name."""
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    aliases = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        first_name = first_names[weight]
        # Two names within one unit always belong to the same stage, which needs one entry.
        if unit_of(name) != unit_of(first_name):
            aliases[name] = first_name
    return aliases


def _take_gradients(
    parameters: Mapping[str, torch.nn.Parameter],
) -> dict[str, torch.Tensor]:
    """Return the gradients of parameters, and clear the gradients in the parameters."""
    gradients = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
        parameter.grad = None
    return gradients
