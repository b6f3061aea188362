"""Tracing of a network by `torch.export`, for networks that torch.fx cannot trace (`testbed.ml.models.fx_tracing`).

The export supports in-place operations, `torch.no_grad`, branches on `self.training` and arbitrary Python between
tensors, as in the models of `transformers`. It is slower than tracing by torch.fx, and its graph has the single
operations of torch's library aten, also from within the modules of torch.nn.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.ml.fields import Fields, InputSpec, arguments, entries, entry
from testbed.ml.models.fx_tracing import (
    BATCH_SIZES,
    TracedNetwork,
    choose_by_mode,
    first_line,
    make_samples,
    seeded_network,
    single_tensor,
)
from testbed.ml.models.maker import MODEL_FILE_KEY, Maker
from testbed.ml.models.measurement import Measure, measure_node, storage_ids

_NETWORK_PREFIX = "network."
"""Prefix of the names in an exported program: the attribute of `TensorOutput` that holds the user's network."""
_READING_OPERATIONS = (
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
)
"""Operations that turn a tensor's value into a number of Python, as ``float(tensor)`` does."""
_NORMALISATIONS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
)
"""Operations of the normalisations that may have running statistics."""


class TensorOutput(nn.Module):
    """The user's network with a uniform signature: from a tensor for each input to a single tensor.

    Without ``fields`` the only input are the samples, (samples, ...). With ``fields`` there is one tensor for each of
    them, (samples, *shape of the field), which the network receives by position, by name, or as one mapping.
    """

    def __init__(self, network: nn.Module, fields: Fields) -> None:
        super().__init__()
        self.network = network
        self._fields = fields

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the network's output, (samples, ...). Raises `InputError` for outputs other than a single tensor."""
        ordered: list[Any] = list(inputs)
        named: dict[str, Any] = {}
        if self._fields:
            names = [each.name for each in self._fields]
            by_name = dict(zip(names, inputs, strict=True))
            ordered, named = arguments(self.network.forward, by_name)
        output = single_tensor(self.network(*ordered, **named))
        if not isinstance(output, torch.Tensor):
            raise InputError(
                f"forward returns {type(output).__name__}: it must return one tensor"
            )
        return output


def trace_by_export(maker: Maker, input_spec: InputSpec) -> TracedNetwork:
    """Export a network in training mode, and measure the nodes of the graph.

    Raises `InputError` for code that torch cannot export, and for a network whose graph gives other results than the
    network itself, in training or in evaluation.
    """
    # Any seed: structure and measurements do not depend on the weights, and units draw their weights again.
    root = seeded_network(maker, seed=0).train()
    try:
        return _export_network(root, input_spec)
    except InputError as error:
        where = usercode.line_of(error, maker.code)
        raise InputError(f"{where}: {error.text}", MODEL_FILE_KEY) from error
    except Exception as error:
        # Any exception: the user's code runs here, with symbols in place of the number of samples.
        where = usercode.line_of(error, maker.code)
        # "Either": `trace_by_fx` was tried first, and its error precedes this one in the message.
        raise InputError(
            f"{where}: cannot be exported by torch either: {first_line(error)}",
            MODEL_FILE_KEY,
        ) from error


def _export_network(root: nn.Module, input_spec: InputSpec) -> TracedNetwork:
    wrapped = TensorOutput(root, input_spec.fields)
    batches = [make_samples(input_spec, size) for size in BATCH_SIZES]
    # For each of several inputs, its position in a row of samples; empty if the samples are the only input.
    input_positions = list(entries(input_spec.fields).values())
    inputs = tuple(entry(batches[0], *position) for position in input_positions)
    if not inputs:
        inputs = (batches[0],)
    # At least two samples: torch would make a constant of a dimension of size 1.
    samples_axis = torch.export.Dim("samples", min=2)
    with torch.random.fork_rng(devices=[]):
        program = torch.export.export(
            wrapped,
            inputs,
            # Nested as the arguments of `forward`: one tuple of inputs, axis 0 of each of which are the samples.
            dynamic_shapes=(({0: samples_axis},) * len(inputs),),
            strict=False,
        )
    graph = _FlatGraph(program, root, input_positions).graph
    constants = _find_constants(program)
    # The graph reads constants as attributes of the network.
    for name, value in constants.items():
        setattr(root, name, value)
    with _unchanged_buffers(root):
        small, large = (_measure_graph(root, graph, samples) for samples in batches)
    _check_results(wrapped, graph, batches[0], inputs)
    return TracedNetwork(root, graph, (small, large), constants)


def _measure_graph(
    root: nn.Module, graph: fx.Graph, samples: torch.Tensor
) -> dict[str, Measure]:
    """Execute a graph node by node for a batch; return the measurements by node name."""
    weights = storage_ids(root)
    measures: dict[str, Measure] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            measures[node.name] = Measure(samples)
        elif node.op != "output":
            measures[node.name] = measure_node(root, node, measures, weights)
    return measures


@contextmanager
def _unchanged_buffers(network: nn.Module) -> Iterator[None]:
    """Restore the network's buffers at the end: a forward in training changes running statistics."""
    copies = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                # Only if necessary: torch cannot write a buffer whose elements share memory, such as an expanded mask.
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _find_constants(program: Any) -> dict[str, torch.Tensor]:
    """Return the tensors created by `forward` independently of the inputs, by their names in the network."""
    signature = program.graph_signature.inputs_to_lifted_tensor_constants
    constants = {}
    for name in signature.values():
        constants[_constant_name(name)] = program.constants[name]
    return constants


def _constant_name(name: str) -> str:
    return "_tensor_constant_" + name.replace(".", "_")


def _check_results(
    network: TensorOutput,
    graph: fx.Graph,
    samples: torch.Tensor,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Raise `InputError` if a graph gives other results than the network, in training or in evaluation.

    A branch on `self.training`, for example, is exported as it is taken in training.
    """
    exported = fx.GraphModule(network.network, graph)
    for training in (True, False):
        expected = _run_seeded(network.train(training), inputs)
        actual = _run_seeded(exported.train(training), (samples,))
        # Not to the bit, since the export may replace an operation by several, which round differently. A different
        # branch or a missing operation changes results by much more than these tolerances.
        if not torch.allclose(expected, actual, rtol=1e-4, atol=1e-5, equal_nan=True):
            mode = "training" if training else "evaluation"
            text = f"behaves differently in {mode} than its export: write this as a module of torch.nn"
            raise InputError(text)
    network.train()


def _run_seeded(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a module's output with the random numbers of seed 0, and leave the module's buffers unchanged.

    Network and graph can thus be compared: they draw equal numbers, and begin with equal running statistics.
    """
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        _unchanged_buffers(module),
    ):
        torch.manual_seed(0)
        output: torch.Tensor = module(*inputs)
    return output


class _FlatGraph:
    """A copy of the graph of an exported program, adapted for `TracedNetwork`.

    The graph of a program has a placeholder for each input, weight and buffer, and contains a graph for each `with`
    statement. The copy has one placeholder, for the samples, and contains no graphs. It reads weights and buffers from
    the network by their paths, calls normalisations of torch.nn as modules, changes no tensor in place, and follows the
    mode of its module, training or evaluation.
    """

    def __init__(
        self, program: Any, network: nn.Module, input_positions: Sequence[Any]
    ) -> None:
        """``program`` is a `torch.export.ExportedProgram` of ``network`` in a `TensorOutput`.

        ``input_positions`` are the arguments of `entry` besides the rows for each of several inputs, in the order of
        the program's inputs; empty if the samples are the only input.
        """
        self.graph = fx.Graph()
        self._network = network
        self._input_positions = iter(input_positions)
        self._samples: fx.Node | None = None
        self._program = program
        self._copies: dict[fx.Node, Any] = {}
        """Node of the program -> its counterpart in ``graph``, or a value that is no node."""
        self._views: dict[fx.Node, fx.Node] = {}
        """Node of the program that is a view -> the node whose memory the view shares, which is not a view itself."""
        self._mode = self.graph.get_attr("training")
        self._copy_graph(program.graph, [])
        # Backwards, so that a node read only by erased nodes is erased as well.
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)

    def _copy_graph(
        self,
        graph: fx.Graph,
        arguments: Sequence[Any],
        *,
        is_nested: bool = False,
    ) -> Any:
        """Copy all nodes of the program's graph or of a nested graph; return the copies of the graph's results.

        ``arguments`` are the copies of the values that a nested graph receives.
        """
        remaining_arguments = iter(arguments)
        for node in graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], self._copy_of)
                if not is_nested:
                    # The results before the last are buffers that the network changes.
                    self.graph.output(results[-1])
                return results
            if node.op == "placeholder" and is_nested:
                copy = next(remaining_arguments)
            elif node.op == "placeholder":
                copy = self._copy_input(node)
            elif node.op == "get_attr":
                copy = getattr(node.graph.owning_module, str(node.target), None)
            else:
                copy = self._copy_call(node)
                if isinstance(copy, fx.Node):
                    copy.meta = _node_location(node)
            self._copies[node] = copy
        raise AssertionError("a graph ends with its output")

    def _copy_of(self, node: fx.Node) -> Any:
        return self._copies[node]

    def _copy_input(self, node: fx.Node) -> fx.Node:
        """Return the node reading the weight, buffer, constant or input of a placeholder of the program."""
        signature = self._program.graph_signature
        for paths in (signature.inputs_to_parameters, signature.inputs_to_buffers):
            if node.name in paths:
                return self.graph.get_attr(
                    paths[node.name].removeprefix(_NETWORK_PREFIX)
                )
        constants = signature.inputs_to_lifted_tensor_constants
        if node.name in constants:
            return self.graph.get_attr(_constant_name(constants[node.name]))
        if self._samples is None:
            self._samples = self.graph.placeholder("samples")
        position = next(self._input_positions, None)
        if position is None:
            return self._samples
        # One of several inputs, cut from the samples' row.
        return self.graph.call_function(entry, (self._samples, *position))

    def _copy_call(self, node: fx.Node) -> Any:
        """Return the copy of a call, or the values replacing the call.

        Raises `InputError` for an operation that a graph divided into units cannot have.
        """
        target = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copy_of)
        if isinstance(target, HigherOrderOperator):
            return self._copy_statement(node, args)
        if target is operator.getitem and isinstance(args[0], tuple | list):
            # One of the results of a `with` statement.
            return list(args[0])[args[1]]  # type: ignore[index]
        assert callable(target)
        if not isinstance(target, OpOverload):
            return self.graph.call_function(target, args, kwargs)
        if target in _READING_OPERATIONS:
            raise InputError(f"{_source_line(node)}reads values of a tensor")
        if target in _NORMALISATIONS:
            # As a module, by which the testbed recognises running statistics, and which counts its batches.
            path = self._normalisation_path(node)
            if path:
                return self.graph.call_module(path, (args[0],))
        # An overload has a text such as "aten.add_.Tensor"; names of operations in place end with an underscore.
        _, name, _ = str(target).split(".")
        if target._schema.is_mutable and name.endswith("_"):
            return self._copy_in_place(node, target, args, kwargs)
        if target.is_view and isinstance(node.args[0], fx.Node):
            self._views[node] = self._views.get(node.args[0], node.args[0])
        return self.graph.call_function(
            target, self._arguments_by_mode(target, args), kwargs
        )

    def _arguments_by_mode(
        self, target: OpOverload, args: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of an operation, with flags of training replaced by the mode of the unit.

        The network was exported in training. A flag that is False there was switched off by the user's code, as by
        ``F.dropout(x, training=False)``, and is False in evaluation as well.
        """
        args_by_mode = list(args)
        for place, argument in enumerate(target._schema.arguments[: len(args)]):
            value = args[place]
            is_flag = argument.name in ("train", "training", "use_input_stats")
            if is_flag and value is True:
                args_by_mode[place] = self._mode
            elif argument.name == "dropout_p" and value:
                # Attention has no flag: its dropout is a probability, which is 0 in evaluation.
                args_by_mode[place] = self.graph.call_function(
                    choose_by_mode, (self._mode, value, 0.0)
                )
        return tuple(args_by_mode)

    def _copy_in_place(
        self, node: fx.Node, target: OpOverload, args: Any, kwargs: Any
    ) -> Any:
        """Replace an in-place operation by the one returning a new tensor, which all later nodes read instead.

        Raises `InputError` if later nodes read the same memory through other tensors as well.
        """
        changed = node.args[0]
        assert isinstance(changed, fx.Node)
        if changed.op == "placeholder" and changed.name.endswith("num_batches_tracked"):
            # A normalisation called as a module counts its batches itself. Any other needs the number only with
            # `momentum=None`, and would read it by `item`, which is rejected.
            return None
        if changed.op == "placeholder" or self._is_read_later(changed, node):
            raise InputError(
                f"{_source_line(node)}changes a tensor in place that is read under another name: compute a new one"
            )
        _, name, overload = str(target).split(".")
        functional = getattr(getattr(torch.ops.aten, name.rstrip("_")), overload)
        copy = self.graph.call_function(
            functional, self._arguments_by_mode(functional, args), kwargs
        )
        copy.meta = _node_location(node)
        self._copies[changed] = copy
        return copy

    def _is_read_later(self, changed: fx.Node, node: fx.Node) -> bool:
        """Return whether memory changed by ``node`` is read later through another tensor than ``changed``.

        Such a tensor is the one of which ``changed`` is a view, or another view of the same tensor.
        """
        base = self._views.get(changed, changed)
        views = [view for view, owner in self._views.items() if owner is base]
        readers: list[fx.Node] = []
        for other in (*views, base):
            if other is not changed:
                readers += other.users
        # torch.fx orders nodes by their places in the graph.
        return any(reader > node for reader in readers)

    def _copy_statement(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """Copy the body of a `with` statement, a nested graph; raises `InputError` for unsupported statements.

        ``args`` are copies of the statement's arguments, of which the body is one.
        """
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            is_enabled, body, *body_arguments = args
            results = self._copy_graph(body.graph, body_arguments, is_nested=True)
            if is_enabled:
                return results
            # A flat graph has no node for `torch.no_grad`. Detaching its results has the same effect: no gradient
            # reaches the operations within.
            detach = torch.ops.aten.detach.default
            return tuple(self.graph.call_function(detach, (each,)) for each in results)
        if name == "wrap_with_autocast":
            _, _, is_enabled, _, body, *body_arguments = args
            # Autocast that is switched off changes nothing.
            if not is_enabled:
                return self._copy_graph(body.graph, body_arguments, is_nested=True)
        raise InputError(
            f"{_source_line(node)}{name}: cannot be divided into units: remove it"
        )

    def _normalisation_path(self, node: fx.Node) -> str:
        """Return the path of the normalisation module whose whole forward is ``node``; empty if no module matches.

        The module's forward must be torch's. A user's module may call `functional.batch_norm`, or the forward of its
        base class, among other operations: calling the module in place of the node would repeat these.
        """
        modules = list(_module_stack(node).values())
        if not modules:
            return ""
        path, _ = modules[-1]
        module = self._network.get_submodule(path)
        is_normalisation = isinstance(module, nn.modules.batchnorm._NormBase)
        is_of_torch = type(module).forward.__module__.startswith("torch.nn.")
        return path if is_normalisation and is_of_torch else ""


def _module_stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """Return the modules in which a node was created, outermost first and without the network itself.

    Keys are the exporter's, one for each call of a module; values are the module's path in the network and its type.
    """
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    modules = {}
    for key, (path, kind) in stack.items():
        # A module called several times has "@1", "@2" ... in its path.
        plain_path, _, _ = path.partition("@")
        # The wrapper has the empty path and the network the path "network"; both become the empty path.
        own_path = f"{plain_path}.".removeprefix(_NETWORK_PREFIX).rstrip(".")
        if own_path:
            modules[key] = (own_path, kind)
    return modules


def _node_location(node: fx.Node) -> dict[str, Any]:
    return {
        "nn_module_stack": _module_stack(node),
        "stack_trace": node.meta.get("stack_trace"),
    }


def _source_line(node: fx.Node) -> str:
    """Return "FILE:LINE: " of the user's line creating a node, as a prefix of errors; empty if unknown."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    if not frames:
        return ""
    file, _, position = frames[-1].removeprefix('File "').partition('", line ')
    number, _, _ = position.partition(",")
    return f"{file}:{number}: "
