"""Tracing of a network by torch.fx, with simultaneous execution for two batch sizes.

torch.fx calls the user's `forward` with proxies, which record each operation as a node of a graph. Here each node is
also executed at once, for a small and a large batch. Numbers that are equal for both are independent of the samples:
the user's code gets them as plain numbers and may branch and loop on them. Only the number of samples and their values
stay unknown.

Torch.fx enters the user's modules and records the operations within. A leaf module, as torch.fx calls it, is not
entered: its call is one node. Modules of torch.nn, such as a linear layer, are leaf modules.

If torch.fx cannot trace a network, `testbed.ml.models.export_tracing` tries; `testbed.ml.models.unit_division` divides
the graph.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.utils import _pytree as pytree

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.ml.fields import InputSpec, arguments, entries, entry
from testbed.ml.models.maker import MODEL_FILE_KEY, Maker
from testbed.ml.models.measurement import Measure, measure_node, storage_ids

# Above one, since a normalisation in training needs at least two samples, and torch.export makes a constant of one.
BATCH_SIZES = (2, 3)
"""Samples of the small and of the large batch: numbers differing between the two depend on the number of samples."""
_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""In-place functions -> functions returning a new tensor: a unit must not modify a tensor that other units read."""
TRANSFORMER_STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch.nn that are entered, so that each of their layers can be a unit."""
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
"""Recurrent networks of torch.nn, whose layers are recorded one by one, so that each can be a unit."""
_CREATION_FUNCTIONS = (
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.rand,
    torch.randn,
    torch.arange,
)
"""Functions creating tensors from sizes only. Without a tensor among its arguments, a call is invisible to torch.fx,
although a size may be the number of samples; so torch.fx is told to replace these functions while it traces."""
_DIFFERS_BY_MODE = "behaves differently in evaluation and in training"
"""Text by which `_trace_on_device` recognises the one error for which another attempt is useful."""
_REMEDY = "rewrite it without that, or move it into a separate module and name this module in `units`"
"""Advice for code that cannot be traced: a module named in `units` is a leaf module."""


@dataclass(frozen=True)
class TracedNetwork:
    """A network with the graph of its operations, and the measurements of the graph's nodes."""

    root: nn.Module
    """The network."""
    graph: fx.Graph
    """The operations of `forward`, one for each node, with a single placeholder and a single output."""
    measures: tuple[dict[str, Measure], dict[str, Measure]]
    """Measurements by node name, for the small and for the large batch."""
    constants: Mapping[str, torch.Tensor]
    """Tensors created by `forward` independently of the samples, by their names in the graph."""


def trace_by_fx(
    maker: Maker, input_spec: InputSpec, leaf_names: Sequence[str] | None
) -> TracedNetwork:
    """Trace and measure a network by torch.fx; raises `InputError` naming the failing line.

    The first attempt uses tensors without values, so large networks are traced quickly. If it fails, for example
    because the user's code reads values, the second attempt uses random values, and the modules ``leaf_names`` are leaf
    modules. Modules without weights are leaf modules if they behave differently in training and in evaluation.
    """
    attempts = (("meta", ()), ("cpu", tuple(leaf_names or ())))
    for device, names in attempts:
        try:
            return _trace_on_device(maker, input_spec, device, names)
        except InputError as error:
            last_error = error
    raise last_error


def _trace_on_device(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    leaf_names: Sequence[str],
) -> TracedNetwork:
    """Trace in training and evaluation; if the two differ, again with modules without weights as leaf modules."""
    try:
        return _trace_both_modes(maker, input_spec, device, leaf_names)
    except InputError as error:
        if _DIFFERS_BY_MODE not in error.text:
            raise
    # DropPath, for example, branches on `self.training`: as a leaf module, it keeps both branches.
    weightless = _weightless_modules(maker)
    return _trace_both_modes(maker, input_spec, device, (*leaf_names, *weightless))


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
    """Return whether a value is a number, text, type, slice or None, or a group of these, and thus has no tensor.

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
    """Construct the network, with activations out of place; raises `InputError` for lazy modules without sizes."""
    root = maker()
    for name, module in root.named_modules():
        if getattr(module, "inplace", False) is True:
            # A unit must not modify a tensor that other units read.
            module.inplace = False
        is_lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
        if is_lazy and module.has_uninitialized_params():
            text = f"'{name}' has no sizes yet: call the network once, as net(torch.zeros(1, *shape)), then return it"
            raise InputError(
                f"{usercode.file_of(maker.code.module)}: {text}", MODEL_FILE_KEY
            )
    return root


def _trace_both_modes(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    leaf_names: Sequence[str],
) -> TracedNetwork:
    """Trace in training and in evaluation; flags and numbers differing between the two follow the mode of the unit."""
    tracer = _trace_in_mode(maker, input_spec, device, leaf_names, training=True)
    evaluation = _trace_in_mode(maker, input_spec, device, leaf_names, training=False)
    _follow_mode(tracer, evaluation.graph, maker)
    # Backwards, so that a node read only by erased nodes is erased as well.
    for node in reversed(tracer.graph.nodes):
        # With this mark on calls of `_CREATION_FUNCTIONS`, a module of the graph would patch these functions again.
        node.meta.pop("is_wrapped", None)
        if not node.users and node.op not in ("placeholder", "output"):
            tracer.graph.erase_node(node)
    constants = _find_constants(tracer)
    return TracedNetwork(tracer.root, tracer.graph, tracer.measures, constants)


def _find_constants(tracer: _Tracer) -> dict[str, torch.Tensor]:
    """Return the tensors created by `forward` independently of the samples, by name in the graph."""
    constants = {}
    for value, name in tracer.tensor_attrs.items():
        # torch.fx gives a created tensor this name; the other entries are attributes of modules.
        is_constant = name.startswith("_tensor_constant")
        if is_constant and isinstance(value, torch.Tensor):
            constants[name] = value
    return constants


def _trace_in_mode(
    maker: Maker,
    input_spec: InputSpec,
    device: str,
    leaf_names: Sequence[str],
    *,
    training: bool,
) -> _Tracer:
    """Trace the network in one mode; raises `InputError` naming the user's line for every failure."""
    if device == "meta":
        with torch.device("meta"):
            root = _make_network(maker)
    else:
        # Any seed: the values only decide branches of the user's code, and units draw their weights again.
        root = seeded_network(maker, seed=0)
    root.train(training)
    file = usercode.file_of(maker.code.module)
    tracer = _Tracer(input_spec, device, leaf_names, file)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            tracer.trace(root)
    except InputError as error:
        where = usercode.line_of(error, maker.code)
        raise InputError(f"{where}: {error.text}", MODEL_FILE_KEY) from error
    except Exception as error:
        # Any exception: the user's code runs here, with proxies in place of tensors.
        where = usercode.line_of(error, maker.code)
        text = f"cannot be traced: {first_line(error)}: {_REMEDY}"
        raise InputError(f"{where}: {text}", MODEL_FILE_KEY) from error
    return tracer


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of the message.

    >>> first_line(ValueError("no such axis\\nstack: ..."))
    'ValueError: no such axis'
    """
    message = str(error).strip()
    first = message.splitlines()[0] if message else ""
    return f"{type(error).__name__}: {first}"


def _follow_mode(tracer: _Tracer, evaluation_graph: fx.Graph, maker: Maker) -> None:
    """Change the graph traced in training to compute the results of evaluation as well.

    Arguments that differ in ``evaluation_graph`` are replaced by nodes that depend on the attribute `training` of the
    unit's module. Raises `InputError` for any other difference between the two graphs.
    """
    graph = tracer.graph
    nodes = list(graph.nodes)
    evaluation_nodes = list(evaluation_graph.nodes)
    with graph.inserting_before(nodes[0]):
        mode = graph.get_attr("training")
    for measures in tracer.measures:
        measures[mode.name] = Measure(value=True)
    for place, node in enumerate(nodes):
        arguments_by_mode = None
        if place < len(evaluation_nodes):
            evaluation_node = evaluation_nodes[place]
            arguments_by_mode = _arguments_by_mode(node, evaluation_node, mode)
        if arguments_by_mode is None:
            where = source_line(node, maker)
            text = f"{_DIFFERS_BY_MODE}: write this as a separate module"
            raise InputError(f"{where}: {text}", MODEL_FILE_KEY)
        node.args, node.kwargs = arguments_by_mode
    _measure_mode_nodes(tracer)


def _arguments_by_mode(node: fx.Node, evaluation_node: fx.Node, mode: fx.Node) -> Any:
    """Return the arguments of a node as (args, kwargs), where differing ones depend on the node ``mode``.

    ``node`` was traced in training, ``evaluation_node`` in evaluation. None if the two call different functions, or
    differ in other arguments than flags and numbers.
    """
    # Targets are compared as text: each trace has functions and paths of its own.
    is_same_function = str(node.target) == str(evaluation_node.target)
    if node.op != evaluation_node.op or not is_same_function:
        return None
    in_training = (node.args, node.kwargs)
    in_evaluation = (evaluation_node.args, evaluation_node.kwargs)
    with node.graph.inserting_before(node):
        return _values_by_mode(in_training, in_evaluation, mode)


def _measure_mode_nodes(tracer: _Tracer) -> None:
    """Store the measurements of each inserted call of `choose_by_mode`, whose result was traced in training."""
    for node in tracer.graph.nodes:
        if node.target is not choose_by_mode:
            continue
        _, in_training, _ = node.args
        for measures in tracer.measures:
            measures.setdefault(node.name, Measure(in_training))


def choose_by_mode(training: bool, in_training: float, in_evaluation: float) -> float:
    """Return the number for a mode; nodes of the graph call this function with the mode of the unit.

    >>> choose_by_mode(False, 0.5, 0.0)
    0.0
    """
    return in_training if training else in_evaluation


def _values_by_mode(in_training: Any, in_evaluation: Any, mode: fx.Node) -> Any:
    """Return nested values where differing flags and numbers depend on ``mode``; None for any other difference."""
    training_values, structure = pytree.tree_flatten(in_training)
    evaluation_values, evaluation_structure = pytree.tree_flatten(in_evaluation)
    if structure != evaluation_structure:
        return None
    values_by_mode = []
    for value, other in zip(training_values, evaluation_values, strict=True):
        # By their texts: nodes of the two graphs are different objects of the same name.
        if repr(value) == repr(other):
            values_by_mode.append(value)
        elif value is True and other is False:
            values_by_mode.append(mode)
        elif isinstance(value, int | float) and isinstance(other, int | float):
            # Such as the probability of dropout, which is zero in evaluation.
            number = mode.graph.call_function(choose_by_mode, (mode, value, other))
            values_by_mode.append(number)
        else:
            return None
    return pytree.tree_unflatten(values_by_mode, structure)


def single_tensor(result: Any) -> Any:
    """Return the result of `forward`; of a mapping, as models of `transformers` return, the logits or the only tensor.

    Raises `InputError` for a mapping of several tensors without logits.

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


def make_samples(input_spec: InputSpec, size: int) -> torch.Tensor:
    """Return a random batch for a network, (size, ...); integers are zero, a valid index of every embedding.

    >>> make_samples(InputSpec((1, 8, 8)), 2).shape
    torch.Size([2, 1, 8, 8])
    """
    generator = torch.Generator().manual_seed(size)
    samples = torch.rand(size, *input_spec.shape, generator=generator)
    # Of several inputs, some may be integers although the row of a sample is float32.
    for begin, end, _, kind in entries(input_spec.fields).values():
        if kind != "float32":
            samples[:, begin:end] = 0
    # The random values are in [0, 1), and become zero.
    return samples.long() if input_spec.integers else samples


class _ValueProxy(fx.Proxy):
    """The proxy of a tensor in the user's code; the tracer has the tensor's value for both batch sizes."""

    def __getattr__(self, k: str) -> Any:
        value = getattr(self.tracer.values(self.node)[0], k)  # type: ignore[attr-defined]
        if callable(value):
            # torch.fx returns a proxy of the method, and records its call.
            return super().__getattr__(k)
        # `create_proxy` returns attributes such as `shape` as plain numbers where possible.
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
    """The proxy of the last states of all layers of a recurrent network, (layers x directions, samples, features).

    An index reads the state of a single layer from this layer's node. If ``hidden[-1]`` were read from the states of
    all layers, the state of each layer would cross all later cuts as a second tensor, and prevent them.
    """

    def __init__(self, layer_states: Sequence[Any], all_states: _ValueProxy) -> None:
        super().__init__(all_states.node, all_states.tracer)
        self._layer_states = layer_states

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            return self.tracer.create_proxy(
                "call_function", operator.getitem, (self, key), {}
            )
        states = self.tracer.values(self.node)[0]  # type: ignore[attr-defined]
        layers = len(self._layer_states)
        directions = len(states) // layers
        # By a range, since negative indices count from the end.
        place = range(len(states))[key]
        # Torch numbers layers first, and the directions of a layer within.
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

    The graph calls this function once for each layer, where torch's module calls one kernel for all layers. The states
    at the beginning are zero.

    Args:
        values: (samples, steps, features) if ``batch_first``, else (steps, samples, features).
        weights: the layer's weights, in the order of `_recurrent_weights`.
        mode: LSTM, GRU, RNN_TANH or RNN_RELU, as `torch.nn.RNNBase` names them.
        bias: whether ``weights`` contain biases.
        directions: 2 for a bidirectional layer, else 1.
        sizes: features of the hidden state and of the cell state; states are (directions, samples, features).
        batch_first: whether the first axis of ``values`` is that of the samples.
    """
    samples = values.shape[0 if batch_first else 1]
    hidden_size, cell_size = sizes
    hidden = values.new_zeros(directions, samples, hidden_size)
    # Also for a GRU or RNN, which have no cells: the tensor counts in the measured cost of the layer.
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
    """Executes each node while tracing, and returns numbers independent of the samples to the user's code."""

    # Otherwise torch.fx would make constants of buffers; they are attributes of the network, as weights are.
    proxy_buffer_attributes = True

    def __init__(
        self,
        input_spec: InputSpec,
        device: str,
        leaf_names: Sequence[str],
        file: str,
    ) -> None:
        """Prepare for a network with the input ``input_spec``.

        ``device`` is "cpu", or "meta" for tensors without values; ``leaf_names`` are names of leaf modules; ``file`` is
        the path of the user's file.
        """
        super().__init__(autowrap_functions=_CREATION_FUNCTIONS)
        # torch.fx replaces the functions in the user's module only, where they are called as `torch.zeros`.
        self._autowrap_search.append(torch)
        self._file = file
        self.measures: tuple[dict[str, Measure], dict[str, Measure]] = ({}, {})
        self._input_spec = input_spec
        self._weights: Collection[int] = ()
        self._device = device
        self._leaf_names = _innermost_names(leaf_names)
        self._is_executing = False
        """Whether a node is executed now: the calls of modules and functions within are not recorded."""
        self._layered_module: nn.Module | None = None
        """The recurrent network whose layers are recorded one by one, or were recorded last."""

    def values(self, node: fx.Node) -> tuple[Any, Any]:
        """Return the results of a node for the small and for the large batch."""
        small, large = self.measures
        return small[node.name].value, large[node.name].value

    # Methods that torch.fx calls, with the names that it has for their arguments

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: Any = None,
    ) -> Any:
        """Return the function to trace and the arguments: the network and the samples.

        ``root_fn`` is the network's `forward`. Arguments besides the inputs keep their defaults.
        """
        self._weights = storage_ids(self.root)
        required = _required_arguments(root_fn)
        fields = self._input_spec.fields
        # "self" and the samples are always passed.
        if len(required) > 2 and not fields:
            names = ", ".join(required[1:])
            raise InputError(
                f"forward takes {names}: give the data an input of each name",
                MODEL_FILE_KEY,
            )

        def call_forward(root: nn.Module, samples: fx.Proxy) -> Any:
            if not fields:
                return single_tensor(root_fn(root, samples))
            # Each input is cut from the row of a sample.
            inputs = {}
            for name, position in entries(fields).items():
                inputs[name] = self.create_proxy(
                    "call_function", entry, (samples, *position), {}
                )
            ordered, named = arguments(root_fn, inputs)
            return single_tensor(root_fn(root, *ordered, **named))

        placeholder = self.create_proxy("placeholder", "samples", (), {})
        return call_forward, [self.root, placeholder]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of a module is one node."""
        if module_qualified_name in self._leaf_names:
            return True
        if type(m) in TRANSFORMER_STACKS or self._layered_module is m:
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Trace the call of a module; while a node is executed, only call the module.

        Layers of encoders, decoders and recurrent networks of torch.nn are traced one by one.
        """
        if self._is_executing:
            return forward(*args, **kwargs)
        if type(m) in (nn.TransformerEncoder, nn.TransformerDecoder):
            # In evaluation, torch's forward skips padding in the whole stack, which single units cannot do.
            forward = partial(self._call_stack, m)
        elif isinstance(m, nn.RNNBase) and _can_call_layers(m, args, kwargs):
            forward = partial(self._call_recurrent, m)
            # Else the network would be a leaf module, as a module of torch.nn.
            self._layered_module = m
        return super().call_module(m, forward, args, kwargs)

    def _call_stack(
        self,
        stack: Any,
        values: Any,
        *memory: Any,
        is_causal: bool | None = None,
        **masks: Any,
    ) -> Any:
        """Call the layers of an encoder or decoder one after the other, as torch's `forward` does in training.

        ``memory`` is the output of the encoder for a decoder, and may be the mask for an encoder, whose second argument
        this is. ``masks`` are the other arguments of the stack.
        """
        is_encoder = isinstance(stack, nn.TransformerEncoder)
        if is_encoder and memory:
            masks["mask"] = memory[0]
            memory = memory[1:]
        mask = masks.get("mask" if is_encoder else "tgt_mask")
        if isinstance(mask, fx.Proxy):
            mask, _ = self.values(mask.node)
        batch_first = stack.layers[0].self_attn.batch_first
        sequence_length = values.shape[1 if batch_first else 0]
        # As torch's forward does: if the caller passes no flag, the mask is compared with a causal one.
        causal_flag = masks.pop("tgt_is_causal", is_causal)
        causal = _detect_is_causal_mask(mask, causal_flag, sequence_length)
        # The names of a layer's arguments differ from those of the stack.
        if is_encoder:
            masks["src_mask"] = masks.pop("mask", None)
            masks["is_causal"] = causal
        else:
            masks["tgt_is_causal"] = causal
        for layer in stack.layers:
            values = layer(values, *memory, **masks)
        return values if stack.norm is None else stack.norm(values)

    def _call_recurrent(self, module: nn.RNNBase, values: Any) -> Any:
        """Call the layers of a recurrent network one after the other.

        The results are those of torch's module: the output of the last layer, and the last states of all layers.
        """
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
        """Return a proxy of an attribute; while a node is executed, the attribute, such as a weight to compute with."""
        if self._is_executing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy for the result of a node."""
        return _ValueProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Iterate over a proxy; raises `InputError` if the length depends on the number of samples."""
        return (obj[place] for place in range(len(obj)))  # type: ignore[index]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Raise `InputError` for a branch: a value independent of the samples is a number, not a proxy."""
        is_tensor = isinstance(self.values(obj.node)[0], torch.Tensor)
        unknown = "values of a tensor" if is_tensor else "the number of samples"
        raise InputError(f"branches depending on {unknown}: {_REMEDY}")

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Record and execute a node; return its result if that is a number independent of the samples, else a proxy."""
        proxy = super().create_proxy(*args, **kwargs)
        small, large = self.values(proxy.node)
        if isinstance(small, torch.device):
            # Units compute on the CPU, whichever device traces.
            return torch.device("cpu")
        # True == 1, so the types are compared as well.
        is_equal = is_plain(small) and small == large and type(small) is type(large)
        return small if is_equal else proxy

    def _current_line(self) -> str | None:
        """Return the line of the user's file being traced, as FILE:LINE; None outside of the file."""
        # Faster than torch's own way, a full traceback for each node.
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
        """Record and execute a node; raises `InputError` for unsupported operations."""
        # The graph records operations, and not the `with` statement around them.
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise InputError(
                "`with` torch.no_grad or torch.autocast is lost in tracing: use .detach() or .to(...)"
            )
        if kind == "call_method":
            _check_method(target)
        target = _IN_PLACE.get(target, target)
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.stack_trace = self._current_line()
        if kind == "output":
            return node
        self._is_executing = True
        try:
            self._execute(node)
        except Exception as error:
            # Any exception of torch, such as that for a wrong shape; the caller adds the user's line.
            raise InputError(first_line(error)) from error
        finally:
            self._is_executing = False
        return node

    def _execute(self, node: fx.Node) -> None:
        """Execute and measure a node for both batch sizes."""
        for size, measures in zip(BATCH_SIZES, self.measures, strict=True):
            if node.op == "placeholder":
                samples = make_samples(self._input_spec, size).to(self._device)
                measure = Measure(samples)
            else:
                measure = measure_node(
                    self.root, node, measures, self._weights, self._device
                )
            measures[node.name] = measure


def _innermost_names(names: Sequence[str]) -> list[str]:
    """Return the names of the modules containing no other named module.

    A user may name a module and modules within: the outer module is then entered, and the inner ones are leaf modules.
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


def _can_call_layers(module: nn.RNNBase, args: Any, kwargs: Any) -> bool:
    """Return whether a recurrent network has several layers, and a call with the arguments can be divided.

    A call with initial states cannot be divided, since `recurrent_layer` begins with zeros.
    """
    # By the exact type: a subclass may have a forward of its own.
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


def _check_method(method: str) -> None:
    """Raise `InputError` for a method of tensors reading values, or changing the tensor in place."""
    if method in ("item", "tolist"):
        raise InputError(f".{method}() reads values of a tensor: {_REMEDY}")
    # Methods such as `add_` change the tensor; `__getitem__` and the like do not.
    if method.endswith("_") and not method.endswith("__"):
        raise InputError(f".{method}() changes a tensor in place: compute a new one")
