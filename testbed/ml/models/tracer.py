"""Tracing of a network by torch.fx, with simultaneous execution for two batch sizes.

torch.fx calls the user's `forward` with proxies, which record each operation as a node. Here each node is also executed
at once, for a small and a large batch. Results that are equal for both are independent of the samples: the user's code
gets them as plain numbers and may branch and loop on them. Only the number of samples and their values stay unknown.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.device import Cost, Kind
from testbed.ml.fields import InputSpec, arguments, entries, entry
from testbed.ml.models.making import KEY, Maker
from testbed.ml.models.shapes import BYTES_PER_VALUE

# Above one, since a normalisation in training needs at least two samples, and torch.export makes a constant of one.
BATCHES = (2, 3)
"""The two batch sizes used for tracing: values differing between them depend on the batch."""
_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""In-place functions with their equivalents returning new values: units must not modify values read by others."""
STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch.nn traced into, because their layers are units."""
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
"""Recurrent networks of torch.nn, whose layers are units. Subclasses may have a forward of their own."""
_CREATION_FUNCTIONS = (
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.rand,
    torch.randn,
    torch.arange,
)
"""Functions creating tensors from sizes, including the number of samples: torch hides these calls from tracers."""
_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
)
"""Operations that multiply samples by weights."""
_UNLIKE = "behaves differently in evaluation and in training"
"""Text by which `_trace_on_device` recognises the one error for which another attempt is useful."""
_REMEDY = "rewrite it without that, or move it into a separate module and name this module in `units`"
"""Advice for code that cannot be traced: a module named in `units` is one step, and is not traced."""


@dataclass(frozen=True)
class Measure:
    """Measurements of one executed step."""

    value: Any
    """The result: a tensor, a number, or a group of them."""
    cost: Cost = field(default_factory=Cost)
    """Cost of the step for the whole batch."""
    created_values: int = 0
    """Number of values in the tensors created by the step."""
    min_samples: int = 1
    """Minimum number of samples in training."""

    @property
    def has_work(self) -> bool:
        """Whether torch counts FLOPs in the step."""
        return self.cost.of().flops > 0


@dataclass(frozen=True)
class Traced:
    """A network and its traced steps."""

    root: nn.Module
    """The network."""
    graph: fx.Graph
    """The operations of `forward`, one for each node."""
    runs: tuple[dict[str, Measure], ...]
    """Measurements by node, for each batch size."""
    constants: Mapping[str, torch.Tensor]
    """Tensors created by `forward` independently of inputs, by their names in the graph."""


def trace_by_fx(
    maker: Maker, input_spec: InputSpec, whole: Sequence[str] | None
) -> Traced:
    """Trace and measure a network by torch.fx; raises `InputError` naming the failing line.

    The first attempt runs on tensors without values, so large networks are described quickly. If the user's code needs
    values, the second attempt runs on random ones, with the modules ``whole`` traced as single steps. Modules without
    weights are traced into only if they behave equally in training and in evaluation.
    """
    attempts = (("meta", ()), ("cpu", tuple(whole or ())))
    for device, names in attempts:
        try:
            return _trace_on_device(maker, input_spec, device, names)
        except InputError as error:
            refusal = error
    raise refusal


def _trace_on_device(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    whole: Sequence[str],
) -> Traced:
    """Trace in training and evaluation; if the two differ, keep modules without weights as single steps."""
    try:
        return _trace_modes(maker, input_spec, device, whole)
    except InputError as error:
        if _UNLIKE not in error.text:
            raise
    # DropPath, for example, branches on `self.training`: such a module is kept as one step, with both branches.
    weightless = _weightless_modules(maker)
    return _trace_modes(maker, input_spec, device, (*whole, *weightless))


def _weightless_modules(maker: Maker) -> list[str]:
    """Return the names of modules without weights and submodules, for example DropPath."""
    with torch.device("meta"):
        network = _make_network(maker)
    names = []
    for name, module in network.named_modules():
        is_leaf = next(module.children(), None) is None
        if name and is_leaf and not module.state_dict():
            names.append(name)
    return names


def seeded_network(maker: Maker, seed: int) -> nn.Module:
    """Construct the network with the weights of a seed; torch's global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "weights"))
        return _make_network(maker)


def is_plain(value: object) -> bool:
    """Return whether a value contains no tensor, and therefore depends on the number of samples at most.

    >>> is_plain((3, torch.float32))
    True
    >>> is_plain(torch.zeros(3))
    False
    """
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(
        value, int | float | str | torch.dtype | torch.device | slice
    )


def source_line(node: fx.Node, maker: Maker) -> str:
    """Return the place of a node in the user's source, as FILE:LINE, or the file alone if the line is unknown."""
    return node.stack_trace or usercode.file_of(maker.code.module)


def _make_network(maker: Maker) -> nn.Module:
    """Construct the network without in-place activations; raises `InputError` for lazy modules without sizes."""
    root = maker()
    for name, module in root.named_modules():
        if getattr(module, "inplace", False) is True:
            # A unit must not modify values that other units read.
            module.inplace = False
        is_lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
        if is_lazy and module.has_uninitialized_params():
            text = f"'{name}' has no sizes yet: call the network once, as net(torch.zeros(1, *shape)), then return it"
            raise InputError(f"{usercode.file_of(maker.code.module)}: {text}", KEY)
    return root


def _trace_modes(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    whole: Sequence[str],
) -> Traced:
    """Trace in training and in evaluation; booleans differing between the two follow the unit's mode."""
    tracer = _trace_mode(maker, input_spec, device, whole, training=True)
    evaluation = _trace_mode(maker, input_spec, device, whole, training=False)
    _follow_mode(tracer, evaluation.graph, maker)
    # Backwards, so that a node read only by erased ones is erased as well.
    for node in reversed(tracer.graph.nodes):
        # With this mark, the modules made of the graph would have torch.fx patch the functions again.
        node.meta.pop("is_wrapped", None)
        if not node.users and node.op not in ("placeholder", "output"):
            tracer.graph.erase_node(node)
    constants = _find_constants(tracer)
    return Traced(tracer.root, tracer.graph, tracer.runs, constants)


def _find_constants(tracer: _Tracer) -> dict[str, torch.Tensor]:
    """Return the tensors created by `forward` independently of the samples, by name in the graph."""
    constants = {}
    for value, name in tracer.tensor_attrs.items():
        # torch.fx gives such a tensor this name; the others here are attributes of modules.
        is_constant = name.startswith("_tensor_constant")
        if is_constant and isinstance(value, torch.Tensor):
            constants[name] = value
    return constants


def _trace_mode(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    whole: Sequence[str],
    *,
    training: bool,
) -> _Tracer:
    """Trace the network in one mode; raises `InputError` naming the user's line for every failure."""
    if device == "meta":
        with torch.device("meta"):
            root = _make_network(maker)
    else:
        # Any seed: values serve branches of the user's code alone, and all weights are drawn again in units.
        root = seeded_network(maker, 0)
    root.train(training)
    file = usercode.file_of(maker.code.module)
    tracer = _Tracer(input_spec, device, whole, file)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            tracer.trace(root)
    except InputError as error:
        where = usercode.line_of(error, maker.code)
        raise InputError(f"{where}: {error.text}", KEY) from error
    except Exception as error:
        # Any exception: the user's code runs here, on proxies that it was not written for.
        where = usercode.line_of(error, maker.code)
        text = f"cannot be traced: {first_line(error)}: {_REMEDY}"
        raise InputError(f"{where}: {text}", KEY) from error
    return tracer


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    >>> first_line(ValueError("no such axis\\nstack: ..."))
    'ValueError: no such axis'
    """
    message = str(error).strip()
    first = message.splitlines()[0] if message else ""
    return f"{type(error).__name__}: {first}"


def _follow_mode(tracer: _Tracer, evaluating: fx.Graph, maker: Maker) -> None:
    """Make arguments follow the unit's mode where evaluation has another value.

    ``evaluating`` is the graph of evaluation. Raises `InputError` for any other difference between the two graphs.
    """
    graph = tracer.graph
    nodes = list(graph.nodes)
    evaluation_nodes = list(evaluating.nodes)
    # A module that is made of the graph has this attribute, which `train` and `eval` change.
    with graph.inserting_before(nodes[0]):
        mode = graph.get_attr("training")
    for measures in tracer.runs:
        measures[mode.name] = Measure(value=True)
    for place, node in enumerate(nodes):
        replaced = None
        if place < len(evaluation_nodes):
            replaced = _arguments_by_mode(node, evaluation_nodes[place], mode)
        if replaced is None:
            where = source_line(node, maker)
            text = f"{_UNLIKE}: write this as a separate module"
            raise InputError(f"{where}: {text}", KEY)
        node.args, node.kwargs = replaced
    _measure_mode_nodes(tracer)


def _arguments_by_mode(node: fx.Node, other: fx.Node, mode: fx.Node) -> Any:
    """Return the arguments of a node, following the mode; None unless both nodes call the same function.

    ``node`` was traced in training, ``other`` in evaluation; ``mode`` is the node of the unit's mode.
    """
    # Targets are compared as text: each trace has functions and paths of its own.
    is_same_function = str(node.target) == str(other.target)
    if node.op != other.op or not is_same_function:
        return None
    in_training = (node.args, node.kwargs)
    in_evaluation = (other.args, other.kwargs)
    with node.graph.inserting_before(node):
        return _follow_arguments(in_training, in_evaluation, mode)


def _measure_mode_nodes(tracer: _Tracer) -> None:
    """Record the value in training of each inserted call of `by_mode`, as if the call had been traced."""
    for node in tracer.graph.nodes:
        if node.target is not by_mode:
            continue
        _, in_training, _ = node.args
        for measures in tracer.runs:
            measures.setdefault(node.name, Measure(in_training))


def by_mode(training: bool, in_training: float, in_evaluation: float) -> float:
    """Return the number for a mode; a function of the graph, called with the mode of the unit.

    >>> by_mode(False, 0.5, 0.0)
    0.0
    """
    return in_training if training else in_evaluation


def _follow_arguments(in_training: Any, in_evaluation: Any, mode: fx.Node) -> Any:
    """Return arguments following the mode where flags or numbers differ; None for any other difference."""
    values, structure = pytree.tree_flatten(in_training)
    others, other_structure = pytree.tree_flatten(in_evaluation)
    if structure != other_structure:
        return None
    following = []
    for value, other in zip(values, others, strict=True):
        # By their texts: nodes of the two graphs are different objects of the same name.
        if repr(value) == repr(other):
            following.append(value)
        elif value is True and other is False:
            following.append(mode)
        elif isinstance(value, int | float) and isinstance(other, int | float):
            # Such as the probability of dropout, which is zero in evaluation.
            number = mode.graph.call_function(by_mode, (mode, value, other))
            following.append(number)
        else:
            return None
    return pytree.tree_unflatten(following, structure)


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the cost of operations: values of new tensors, values read for these tensors, FLOPs; views are free."""

    def __init__(self, weights: Collection[int]) -> None:
        """``weights`` are the `storage_ids` of the network."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.created_values = 0
        self.min_samples = 1
        self.cost = Cost()
        self.counter = FlopCounterMode(display=False)
        """The counter, to be entered before this mode."""
        self._weights = weights

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func.name().partition(".")[0] in _PRODUCTS:
            _check_types(args)
        before = self.counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self.counter.get_total_flops() - before
        # Of several results the first counts: a normalisation also returns statistics, for its backward.
        is_group = isinstance(result, tuple | list) and bool(result)
        main = result[0] if is_group else result
        if _is_float_tensor(main) and not func.is_view:
            self._count_work(func, args, kwargs, main, flops)
        return result

    def _count_work(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        created: torch.Tensor,
        flops: float,
    ) -> None:
        """Add the cost of an operation from its arguments and the created tensor."""
        leaves = pytree.tree_leaves((args, kwargs))
        read = [each for each in leaves if _is_float_tensor(each)]
        if "batch_norm" in func.name() and _needs_two_samples(args, read[0]):
            self.min_samples = 2
        accessed = created.numel()
        matrices = 0
        for tensor in read:
            if tensor.untyped_storage()._cdata not in self._weights:
                accessed += tensor.numel()
            elif tensor.ndim > 1:
                # Biases and normalisations are small; `Cost` counts kernels and matrices alone.
                matrices += tensor.numel()
        self.created_values += created.numel()
        self.cost += Cost(
            flops,
            BYTES_PER_VALUE * accessed,
            BYTES_PER_VALUE * matrices,
            _work_kind(func, args, flops),
        )


def _needs_two_samples(arguments: Sequence[Any], samples: torch.Tensor) -> bool:
    """Return whether a normalisation over a batch, (samples, channels, ...), fails for a single sample."""
    # Of the arguments of a normalisation, only the flag of training is a boolean.
    is_training = any(each is True for each in arguments)
    # In training, a channel with one value has no variance.
    return is_training and math.prod(samples.shape[2:]) == 1


def _is_float_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_types(arguments: Sequence[Any]) -> None:
    """Raise TypeError for a product of different types, which torch accepts for tensors without values."""
    types = set()
    for each in arguments:
        if _is_float_tensor(each):
            types.add(str(each.dtype).removeprefix("torch."))
    if len(types) > 1:
        factors = " by ".join(sorted(types))
        text = "samples are float32: convert them, or the network by .float()"
        raise TypeError(f"multiplies {factors}; {text}")


def _work_kind(operation: Any, arguments: Sequence[Any], flops: float) -> Kind:
    """Return the kind of layer of an aten operation; a device may have a rate for each kind."""
    name = operation.name()
    if name == "aten::convolution":
        # convolution(input, weight, ..., groups)
        weight = arguments[1]
        groups = arguments[-1]
        if groups > 1:
            return "depthwise"
        kernel_size = math.prod(weight.shape[2:])
        return "pointwise" if kernel_size == 1 else "convolution"
    if flops:
        return "linear"
    if "norm" in name:
        return "normalisation"
    return "pooling" if "pool" in name or "mean" in name else "activation"


def single_tensor(result: Any) -> Any:
    """Return the result of `forward`, or the `logits` or only tensor of a mapping, as models of `transformers` return.

    Raises `InputError` for other mappings.

    >>> single_tensor({"logits": torch.tensor(1.0), "loss": torch.tensor(2.0)})
    tensor(1.)
    """
    if not isinstance(result, Mapping):
        return result
    tensors = {}
    for name, value in result.items():
        if isinstance(value, torch.Tensor | fx.Proxy):
            tensors[name] = value
    if "logits" in tensors:
        return tensors["logits"]
    if len(tensors) != 1:
        names = ", ".join(tensors)
        raise InputError(
            f"forward returns {names}: it must return one tensor, or one named 'logits'"
        )
    return next(iter(tensors.values()))


def samples_of(input_spec: InputSpec, size: int) -> torch.Tensor:
    """Return sample inputs for a network, (size, ...); integers are zero, a valid index of every embedding.

    >>> samples_of(InputSpec((1, 8, 8)), 2).shape
    torch.Size([2, 1, 8, 8])
    """
    generator = torch.Generator().manual_seed(size)
    samples = torch.rand(size, *input_spec.shape, generator=generator)
    # Inputs of integers beside inputs of floats: the row of a sample is float32 then.
    for begin, end, _, kind in entries(input_spec.fields).values():
        if kind != "float32":
            samples[:, begin:end] = 0
    # Values in [0, 1) become zero.
    return samples.long() if input_spec.integers else samples


def storage_ids(root: nn.Module) -> frozenset[int]:
    """Return the memory identifiers of a network's weights and buffers.

    A view of a weight, such as its transpose, has the same identifier.
    """
    identifiers = set()
    for tensor in (*root.parameters(), *root.buffers()):
        # Not `data_ptr`, which is 0 for all tensors without values.
        identifiers.add(tensor.untyped_storage()._cdata)
    return frozenset(identifiers)


def measure_step(
    root: nn.Module,
    node: fx.Node,
    runs: Mapping[str, Measure],
    weights: Collection[int],
    device: str = "cpu",
) -> Measure:
    """Execute one step and return its measurements.

    Args:
        root: the network.
        node: the step.
        runs: the measurements of all earlier steps by name.
        weights: the network's `storage_ids`.
        device: "cpu", or "meta" for tensors without values.
    """
    if node.op == "get_attr":
        attribute = operator.attrgetter(str(node.target))(root)
        if isinstance(attribute, torch.Tensor):
            # The user's constructor may have put a plain attribute on another device.
            attribute = attribute.to(device)
        return Measure(attribute)

    def result_of(read: fx.Node) -> Any:
        return runs[read.name].value

    args, kwargs = fx.map_arg((node.args, node.kwargs), result_of)
    work = _WorkCounter(weights)
    with torch.device(device), work.counter, work:
        value = _execute_node(root, node, args, kwargs)
    return Measure(value, work.cost, work.created_values, work.min_samples)


def _execute_node(root: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return module(*args, **kwargs)
    if node.op == "call_method":
        owner, *others = args
        method = getattr(owner, str(node.target))
        return method(*others, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class _ValueProxy(fx.Proxy):
    """A proxy whose value the tracer knows for both batch sizes."""

    def __getattr__(self, k: str) -> Any:
        value = getattr(self.tracer.values(self.node)[0], k)  # type: ignore[attr-defined]
        if callable(value):
            # A method: torch.fx records its call.
            return super().__getattr__(k)
        # Attributes such as `shape` are read at once, so that the user's code gets plain numbers.
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        sizes = {len(value) for value in self.tracer.values(self.node)}  # type: ignore[attr-defined]
        if len(sizes) > 1:
            raise InputError(
                "the number of samples is not known here: use x.shape[0] instead of len(x)"
            )
        return int(sizes.pop())

    def __index__(self) -> int:
        raise InputError(
            "the number of samples is not known here: build the network so that it accepts any number"
        )

    def __setitem__(self, key: object, value: object) -> None:
        raise InputError(
            "changes a tensor in place: compute a new one, as torch.where and torch.cat do"
        )


class _RecurrentStates(_ValueProxy):
    """The last states of all layers of a recurrent network, of which a single layer's state can be read by index.

    If ``hidden[-1]`` were read from all states together, the state of each layer would cross all later cuts as a second
    tensor, and prevent them.
    """

    def __init__(self, layer_states: Sequence[Any], all_states: _ValueProxy) -> None:
        super().__init__(all_states.node, all_states.tracer)
        self._layer_states = layer_states

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            return self.tracer.create_proxy(
                "call_function", operator.getitem, (self, key), {}
            )
        # torch stacks the states as (layers x directions); each unit knows those of its own layer.
        states = self.tracer.values(self.node)[0]  # type: ignore[attr-defined]
        layers = len(self._layer_states)
        directions = len(states) // layers
        # A range counts negative indices from the end, as the stacked tensor does.
        place = range(layers * directions)[key]
        layer, direction = divmod(place, directions)
        return self._layer_states[layer][direction]


def recurrent_layer(
    values: torch.Tensor,
    weights: list[torch.Tensor],
    *,
    mode: str,
    bias: bool,
    directions: int,
    sizes: tuple[int, int],
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the output of one layer of `torch.nn.LSTM`, `GRU` or `RNN` for a batch, and the layer's last states.

    Args:
        values: (samples, steps, features) if ``batch_first``, else (steps, samples, features).
        weights: the layer's weights, as torch's kernels take them.
        mode: LSTM, GRU, RNN_TANH or RNN_RELU, as `torch.nn.RNNBase` names them.
        bias: whether ``weights`` contain biases.
        directions: 2 for a bidirectional layer, else 1.
        sizes: features of the hidden state and of the cell state; states are (directions, samples, features).
        batch_first: whether the first axis of ``values`` is that of the samples.
    """
    samples = values.shape[0 if batch_first else 1]
    hidden_size, cell_size = sizes
    hidden = values.new_zeros(directions, samples, hidden_size)
    # Counted by the tracer for a GRU or RNN as well, which have no cells.
    cells = values.new_zeros(directions, samples, cell_size)
    state: Any = (hidden, cells) if mode == "LSTM" else hidden
    layers = 1
    # `_call_recurrent` adds dropout between layers by itself, so the layer alone has none and needs no mode.
    dropout = 0.0
    is_training = False
    is_bidirectional = directions == 2
    run = getattr(torch._VF, mode.lower())
    outputs: tuple[torch.Tensor, ...] = run(
        values,
        state,
        weights,
        bias,
        layers,
        dropout,
        is_training,
        is_bidirectional,
        batch_first,
    )
    return outputs


class _Tracer(fx.Tracer):
    """Executes each step while tracing, and returns values independent of the samples to the user's code."""

    # Buffers are read as attributes of the network as weights are, and not as constants of the graph.
    proxy_buffer_attributes = True

    def __init__(
        self,
        input_spec: InputSpec,
        device: str,
        whole: Sequence[str],
        file: str,
    ) -> None:
        """Prepare for samples as ``input_spec`` describes.

        ``device`` is "cpu", or "meta" for tensors without values; ``whole`` names modules that are single steps;
        ``file`` is the user's file.
        """
        super().__init__(autowrap_functions=_CREATION_FUNCTIONS)
        # The functions are patched where they are looked up: in the user's module, and in torch itself.
        self._autowrap_search.append(torch)
        self._file = file
        self.runs: tuple[dict[str, Measure], ...] = ({}, {})
        self._input_spec = input_spec
        self._weights: Collection[int] = ()
        self._device = device
        self._whole = _innermost_names(whole)
        self._running = False
        """Whether a step is executed, in which modules are called and not traced."""
        self._in_layers: nn.Module | None = None
        """The recurrent network whose layers are traced one by one."""

    def values(self, node: fx.Node) -> tuple[Any, Any]:
        """Return the results of a step for both batches."""
        small, large = self.runs
        return small[node.name].value, large[node.name].value

    # Methods called by torch.fx, with its names for their arguments

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: Any = None,
    ) -> Any:
        """Pass the samples alone; other arguments keep the defaults of the user's code."""
        self._weights = storage_ids(self.root)
        # "self" and the samples are always passed.
        required = _required_arguments(root_fn)
        fields = self._input_spec.fields
        if len(required) > 2 and not fields:
            names = ", ".join(required[1:])
            raise InputError(
                f"forward takes {names}: give the data an input of each name", KEY
            )

        def called(root: nn.Module, samples: fx.Proxy) -> Any:
            if not fields:
                return single_tensor(root_fn(root, samples))
            inputs = {}
            for name, part in entries(fields).items():
                inputs[name] = self.create_proxy(
                    "call_function", entry, (samples, *part), {}
                )
            ordered, named = arguments(root_fn, inputs)
            return single_tensor(root_fn(root, *ordered, **named))

        placeholder = self.create_proxy("placeholder", "samples", (), {})
        return called, [self.root, placeholder]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a single step."""
        if module_qualified_name in self._whole:
            return True
        if type(m) in STACKS or self._in_layers is m:
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Trace a call, or execute the call within a step; trace stacked layers one by one."""
        if self._running:
            return forward(*args, **kwargs)
        if type(m) in (nn.TransformerEncoder, nn.TransformerDecoder):
            # In evaluation, torch's forward skips padding in the whole stack, which single units cannot do.
            forward = partial(self._call_stack, m)
        elif isinstance(m, nn.RNNBase) and _is_layered_recurrent(m, args, kwargs):
            forward = partial(self._call_recurrent, m)
            self._in_layers = m
        return super().call_module(m, forward, args, kwargs)

    def _call_stack(
        self,
        stack: Any,
        values: Any,
        *memory: Any,
        is_causal: bool | None = None,
        **masks: Any,
    ) -> Any:
        """Call the layers of an encoder or decoder one after the other, as `forward` does in training."""
        encodes = isinstance(stack, nn.TransformerEncoder)
        if encodes and memory:
            # An encoder's second argument is its mask, a decoder's the memory.
            masks["mask"] = memory[0]
            memory = memory[1:]
        mask = masks.get("mask" if encodes else "tgt_mask")
        if isinstance(mask, fx.Proxy):
            mask, _ = self.values(mask.node)
        batch_first = stack.layers[0].self_attn.batch_first
        steps = values.shape[1 if batch_first else 0]
        # As torch's forward does: unless the caller says so, the mask is compared with a causal one.
        causal = masks.pop("tgt_is_causal", is_causal)
        causal = _detect_is_causal_mask(mask, causal, steps)
        # The names of a layer's arguments differ from those of the stack.
        if encodes:
            masks["src_mask"] = masks.pop("mask", None)
            masks["is_causal"] = causal
        else:
            masks["tgt_is_causal"] = causal
        for layer in stack.layers:
            values = layer(values, *memory, **masks)
        return values if stack.norm is None else stack.norm(values)

    def _call_recurrent(self, module: nn.RNNBase, values: Any) -> Any:
        """Call the layers of a recurrent network one after the other, as torch's kernel for all layers does."""
        directions = 2 if module.bidirectional else 1
        # With a projection, hidden states are smaller than cells.
        hidden_size = module.proj_size or module.hidden_size
        options = {
            "mode": module.mode,
            "bias": module.bias,
            "directions": directions,
            "sizes": (hidden_size, module.hidden_size),
            "batch_first": module.batch_first,
        }
        has_cells = module.mode == "LSTM"
        hidden: list[Any] = []
        cells: list[Any] = []
        for layer in range(module.num_layers):
            weights = _recurrent_weights(module, layer, directions)
            outputs = self.create_proxy(
                "call_function", recurrent_layer, (values, weights), options
            )
            values = outputs[0]
            hidden.append(outputs[1])
            if has_cells:
                cells.append(outputs[2])
            is_last = layer + 1 == module.num_layers
            if module.dropout and not is_last:
                values = functional.dropout(values, module.dropout, module.training)
        last_hidden = self._join_states(hidden)
        if not has_cells:
            return values, last_hidden
        return values, (last_hidden, self._join_states(cells))

    def _join_states(self, layer_states: list[Any]) -> _RecurrentStates:
        joined = self.create_proxy("call_function", torch.cat, (layer_states,), {})
        return _RecurrentStates(layer_states, joined)

    def getattr(
        self,
        attr: str,
        attr_val: Any,
        parameter_proxy_cache: dict[str, Any],
    ) -> Any:
        """Return a proxy of an attribute, or the attribute itself within a step."""
        if self._running:
            # A module that is executed computes with its weights.
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return a proxy for the value of a step."""
        return _ValueProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Iterate over values whose length is equal for all batches."""
        # `len` of a proxy raises for a length that depends on the batch.
        return (obj[place] for place in range(len(obj)))  # type: ignore[index]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Reject unknown values; known values are never proxies."""
        is_tensor = isinstance(self.values(obj.node)[0], torch.Tensor)
        unknown = "values of a tensor" if is_tensor else "the number of samples"
        raise InputError(f"branches depending on {unknown}: {_REMEDY}")

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Trace a step; return the proxy, or the value of a step independent of the samples."""
        proxy = super().create_proxy(*args, **kwargs)
        small, large = self.values(proxy.node)
        if isinstance(small, torch.device):
            # Units compute on the CPU, whichever device traces.
            return torch.device("cpu")
        # True == 1, so the types are compared as well.
        is_equal = is_plain(small) and small == large and type(small) is type(large)
        return small if is_equal else proxy

    def _current_line(self) -> str | None:
        """Return the traced line of the user's code, as FILE:LINE; None outside of the user's file."""
        # torch would create a full traceback for each step.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return None if frame is None else f"{self._file}:{frame.f_lineno}"

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Record and execute a step; raises `InputError` for unsupported steps."""
        # The graph has no node for the mode in which a step runs.
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise InputError(
                "`with` torch.no_grad or torch.autocast is lost in tracing: use .detach() or .to(...)"
            )
        if kind == "call_method":
            _refuse_method(target)
        target = _IN_PLACE.get(target, target)
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.stack_trace = self._current_line()
        if kind == "output":
            return node
        # The calls of modules and functions within the step are executed, not traced.
        self._running = True
        try:
            self._execute(node)
        except Exception as error:
            # Any exception of torch: a wrong shape is found here, at the user's line.
            raise InputError(first_line(error)) from error
        finally:
            self._running = False
        return node

    def _execute(self, node: fx.Node) -> None:
        """Execute a step for both batch sizes."""
        for size, measures in zip(BATCHES, self.runs, strict=True):
            if node.op == "placeholder":
                samples = samples_of(self._input_spec, size).to(self._device)
                measure = Measure(samples)
            else:
                measure = measure_step(
                    self.root, node, measures, self._weights, self._device
                )
            measures[node.name] = measure


def _innermost_names(names: Sequence[str]) -> list[str]:
    """Return the module names without the names of modules around other named ones.

    A user may name a module and modules within it: the outer one is traced then, and the inner ones are single steps.
    """
    innermost = []
    for name in names:
        if not any(other.startswith(f"{name}.") for other in names):
            innermost.append(name)
    return innermost


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of arguments without a default, ``self`` included."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        is_variable = parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if parameter.default is parameter.empty and not is_variable:
            names.append(parameter.name)
    return names


def _is_layered_recurrent(module: nn.RNNBase, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a recurrent network can be traced layer by layer.

    A single layer is one step in any case, and so is a call with initial states: `recurrent_layer` begins with zeros.
    """
    has_several_layers = type(module) in _RECURRENT and module.num_layers > 1
    has_samples_only = len(args) == 1 and not kwargs
    return has_several_layers and has_samples_only


def _recurrent_weights(module: nn.RNNBase, layer: int, directions: int) -> list[Any]:
    """Return the weights of one layer, in the order expected by torch's kernels."""
    weights = []
    for direction in range(directions):
        # torch numbers layers first, and the directions of a layer within.
        names = module._all_weights[layer * directions + direction]
        for name in names:
            weights.append(getattr(module, name))
    return weights


def _refuse_method(method: str) -> None:
    """Raise `InputError` for tensor methods beyond tracing: reading values, and changing a tensor in place."""
    if method in ("item", "tolist"):
        raise InputError(f".{method}() reads values of a tensor: {_REMEDY}")
    # Methods such as `add_` change the tensor; `__getitem__` and the like do not.
    if method.endswith("_") and not method.endswith("__"):
        raise InputError(f".{method}() changes a tensor in place: compute a new one")
