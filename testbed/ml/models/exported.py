"""Tracing of a network by `torch.export`, for networks torch.fx cannot trace.

The export supports in-place operations, `torch.no_grad`, branches on `self.training` and arbitrary Python between
tensors, as in the models of `transformers`; tracing is slower and descends into every module.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.ml.fields import Fields, InputSpec, arguments, entries, entry
from testbed.ml.models.making import KEY, Maker
from testbed.ml.models.tracer import (
    BATCHES,
    Measure,
    Traced,
    by_mode,
    first_line,
    measure_step,
    samples_of,
    seeded_network,
    single_tensor,
    storage_ids,
)

_NETWORK = "network."
_VALUES = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_NORMALISATIONS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
)


class TensorOutput(nn.Module):
    """Wraps a network to accept samples like a model, or each of several inputs, and to return one tensor."""

    def __init__(self, network: nn.Module, fields: Fields) -> None:
        super().__init__()
        self.network = network
        self._fields = fields

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, ...) to the network's output; raises `InputError` for outputs other than a single tensor."""
        ordered: list[Any] = list(inputs)
        named: dict[str, Any] = {}
        if self._fields:
            names = [each.name for each in self._fields]
            by_name = dict(zip(names, inputs, strict=True))
            ordered, named = arguments(self.network.forward, by_name)
        output = single_tensor(self.network(*ordered, **named))
        if not isinstance(output, torch.Tensor):
            raise InputError(
                f"forward returns {type(output).__name__}: it has to return one tensor"
            )
        return output


def trace_by_export(maker: Maker, entering: InputSpec) -> Traced:
    """Export and measure a network in training; raises `InputError` for unsupported code or other results in
    evaluation.
    """
    root = seeded_network(maker, 0).train()
    try:
        return _export_network(root, entering)
    except InputError as error:
        where = usercode.line_of(error, maker.code)
        raise InputError(f"{where}: {error.text}", KEY) from error
    except Exception as error:
        # Any exception: the user's code runs here, on values that it was not written for.
        where = usercode.line_of(error, maker.code)
        raise InputError(
            f"{where}: cannot be exported by torch either: {first_line(error)}", KEY
        ) from error


def _export_network(root: nn.Module, entering: InputSpec) -> Traced:
    wrapped = TensorOutput(root, entering.fields)
    batches = [samples_of(entering, size) for size in BATCHES]
    parts = list(entries(entering.fields).values())
    inputs = tuple(entry(batches[0], *part) for part in parts) or (batches[0],)
    # At least two samples: torch makes a constant of the size 1.
    samples_axis = torch.export.Dim("samples", min=2)
    with torch.random.fork_rng(devices=[]):
        program = torch.export.export(
            wrapped,
            inputs,
            dynamic_shapes=(({0: samples_axis},) * len(inputs),),
            strict=False,
        )
    graph = _Flat(program, parts).graph
    constants = _find_constants(program)
    for name, value in constants.items():
        setattr(root, name, value)
    weights = storage_ids(root)
    runs: tuple[dict[str, Measure], ...] = ({}, {})
    for samples, measures in zip(batches, runs, strict=True):
        for node in graph.nodes:
            if node.op == "placeholder":
                measures[node.name] = Measure(samples)
            elif node.op != "output":
                measures[node.name] = measure_step(root, node, measures, weights)
    _check_results(wrapped, graph, batches[0], inputs)
    return Traced(root, graph, runs, constants)


def _find_constants(program: Any) -> dict[str, torch.Tensor]:
    """Return the tensors `forward` creates independently of its inputs."""
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
    """Reject a graph whose results differ from the network's, in training or in evaluation."""
    exported = fx.GraphModule(network.network, graph)
    for training in (True, False):
        wanted = _run_seeded(network.train(training), inputs)
        actual = _run_seeded(exported.train(training), (samples,))
        # Not to the bit: the export may replace an operation by several.
        if not torch.allclose(wanted, actual, rtol=1e-4, atol=1e-5, equal_nan=True):
            mode = "training" if training else "evaluation"
            text = f"behaves differently in {mode} than its export: write this as a module of torch.nn"
            raise InputError(text)
    network.train()


def _run_seeded(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a module's output, with the same random numbers for each module."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        output: torch.Tensor = module(*inputs)
    return output


class _Flat:
    """Flattens an exported program into one graph over the network's own weights, with modules for running
    statistics.
    """

    def __init__(self, program: Any, parts: Sequence[Any]) -> None:
        """Copy; ``parts`` are the arguments of `entry` for each of several inputs, in order."""
        self.graph = fx.Graph()
        self._parts = iter(parts)
        self._samples: fx.Node | None = None
        self._program = program
        self._copies: dict[fx.Node, Any] = {}
        self._views: dict[fx.Node, fx.Node] = {}
        """For each view, the node whose memory it shares."""
        self._mode = self.graph.get_attr("training")
        self._inline_graph(program.graph, [])
        # Backwards, so that a node read only by erased ones is erased as well.
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)

    def _inline_graph(
        self, graph: fx.Graph, given: Sequence[Any], *, inner: bool = False
    ) -> Any:
        """Copy a graph and return copies of its results. ``given`` are the placeholders' values in a nested graph."""
        arguments = iter(given)
        for node in graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], self._copy_of)
                if not inner:
                    # The results before the last are buffers that the network changes.
                    self.graph.output(results[-1])
                return results
            if node.op == "placeholder":
                copy = next(arguments) if inner else self._copy_inputs(node)
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

    def _copy_inputs(self, node: fx.Node) -> fx.Node:
        signature = self._program.graph_signature
        for named in (signature.inputs_to_parameters, signature.inputs_to_buffers):
            if node.name in named:
                return self.graph.get_attr(named[node.name].removeprefix(_NETWORK))
        constants = signature.inputs_to_lifted_tensor_constants
        if node.name in constants:
            return self.graph.get_attr(_constant_name(constants[node.name]))
        if self._samples is None:
            self._samples = self.graph.placeholder("samples")
        part = next(self._parts, None)
        if part is None:
            return self._samples
        # One of several inputs, cut from the samples' row.
        return self.graph.call_function(entry, (self._samples, *part))

    def _copy_call(self, node: fx.Node) -> Any:
        target = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copy_of)
        if isinstance(target, HigherOrderOperator):
            return self._copy_nested(node, args)
        if target is operator.getitem and isinstance(args[0], tuple | list):
            return list(args[0])[args[1]]  # type: ignore[index]
        assert callable(target)
        if not isinstance(target, OpOverload):
            return self.graph.call_function(target, args, kwargs)
        if target in _VALUES:
            raise InputError(f"{_source_line(node)}reads values of a tensor")
        if target in _NORMALISATIONS:
            # As a module, since its running statistics are part of the unit's state.
            path = _normalisation_path(node)
            if path:
                return self.graph.call_module(path, (args[0],))
        name = str(target).split(".")[1]
        if target._schema.is_mutable and name.endswith("_"):
            return self._in_place(node, target, args, kwargs)
        if target.is_view and isinstance(node.args[0], fx.Node):
            self._views[node] = self._views.get(node.args[0], node.args[0])
        return self.graph.call_function(
            target, self._following_mode(target, args), kwargs
        )

    def _following_mode(
        self, target: OpOverload, args: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return arguments in which training-only flags follow the unit's mode."""
        changed = list(args)
        for place, argument in enumerate(target._schema.arguments[: len(args)]):
            value = changed[place]
            is_flag = argument.name in ("train", "training", "use_input_stats")
            if is_flag and value is True:
                changed[place] = self._mode
            elif argument.name == "dropout_p" and value:
                # Attention's dropout, which has no flag.
                changed[place] = self.graph.call_function(
                    by_mode, (self._mode, value, 0.0)
                )
        return tuple(changed)

    def _in_place(
        self, node: fx.Node, target: OpOverload, args: Any, kwargs: Any
    ) -> Any:
        """Return a new value for one modified in place, for all later readers."""
        changed = node.args[0]
        assert isinstance(changed, fx.Node)
        if changed.op == "placeholder" and changed.name.endswith("num_batches_tracked"):
            # The module of the normalisation counts.
            return None
        if changed.op == "placeholder" or self._is_read_later(changed, node):
            raise InputError(
                f"{_source_line(node)}changes a tensor in place that is read under another name: make a new one"
            )
        _, name, overload = str(target).split(".")
        functional = getattr(getattr(torch.ops.aten, name.rstrip("_")), overload)
        copy = self.graph.call_function(
            functional, self._following_mode(functional, args), kwargs
        )
        copy.meta = _node_location(node)
        self._copies[changed] = copy
        return copy

    def _is_read_later(self, changed: fx.Node, node: fx.Node) -> bool:
        """Return whether another view of a tensor's memory is read after ``node``, which changes the tensor."""
        base = self._views.get(changed, changed)
        shared = [view for view, owner in self._views.items() if owner is base]
        readers: list[fx.Node] = []
        for other in (*shared, base):
            if other is not changed:
                readers += other.users
        return any(reader > node for reader in readers)

    def _copy_nested(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """Copy the contents of `with` statements."""
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            is_enabled, body, *given = args
            results = self._inline_graph(body.graph, given, inner=True)
            if is_enabled:
                return results
            # `torch.no_grad` has no node of its own: its results are cut off from their gradients.
            detach = torch.ops.aten.detach.default
            return tuple(self.graph.call_function(detach, (each,)) for each in results)
        if name == "wrap_with_autocast":
            _, _, is_enabled, _, body, *given = args
            # Autocast that is switched off changes nothing.
            if not is_enabled:
                return self._inline_graph(body.graph, given, inner=True)
        raise InputError(
            f"{_source_line(node)}{name}: cannot be cut into units: leave it out"
        )


def _module_stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """Return the modules a node was created in by their paths in the network, outermost first, without the network
    itself.
    """
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    modules = {}
    for key, (path, kind) in stack.items():
        # A module called several times has "@1", "@2" ... in its path.
        plain_path, _, _ = path.partition("@")
        # The wrapper has the empty path and the network the path "network"; both become the empty path.
        own_path = f"{plain_path}.".removeprefix(_NETWORK).rstrip(".")
        if own_path:
            modules[key] = (own_path, kind)
    return modules


def _normalisation_path(node: fx.Node) -> str:
    """Return the path of the torch.nn normalisation a node belongs to; empty for other nodes."""
    modules = list(_module_stack(node).values())
    if not modules:
        return ""
    path, kind = modules[-1]
    return path if "norm" in str(kind).lower() else ""


def _node_location(node: fx.Node) -> dict[str, Any]:
    return {
        "nn_module_stack": _module_stack(node),
        "stack_trace": node.meta.get("stack_trace"),
    }


def _source_line(node: fx.Node) -> str:
    """Return the source line of a node, for an error."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    if not frames:
        return ""
    file, _, position = frames[-1].removeprefix('File "').partition('", line ')
    number, _, _ = position.partition(",")
    return f"{file}:{number}: "
