"""Division of a user's network into units, which make it a `testbed.ml.models.chain.Model`.

The tracers (`testbed.ml.models.fx_tracing` and `testbed.ml.models.export_tracing`) return a graph of torch.fx with the
result of every node for two batch sizes. Nodes that compute a tensor from the samples are operations. All other nodes
are local: numbers, weights, and masks or positions made from the samples, which each unit that needs them computes
itself.

Cuts divide the sequence of operations into units. A main operation is one for which torch counts FLOPs, such as a
convolution or an attention. Between two successive main operations there is at most one cut, where the fewest values
cross, and the last of several such places: normalisations and activations belong to the unit of the main operation
before them.

A cut is placed where one tensor crosses. If several tensors cross, as within a residual block, a cut is placed only
between modules called by the network itself or listed in a `Sequential`: a block that is a module stays whole.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.ml.fields import InputSpec, entry
from testbed.ml.models.chain import Model, TiedWeight, Unit, joined_shape
from testbed.ml.models.fx_tracing import (
    BATCH_SIZES,
    TRANSFORMER_STACKS,
    TracedNetwork,
    choose_by_mode,
    is_plain,
    seeded_network,
    source_line,
    trace_by_fx,
)
from testbed.ml.models.known_layers import KnownLayers, describe_layers
from testbed.ml.models.maker import MODEL_FILE_KEY, Maker, MeasuredUnit
from testbed.ml.models.measurement import Measure
from testbed.ml.models.shapes import INPUT, Shape

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *TRANSFORMER_STACKS)
"""Modules that only contain a sequence of modules, so a cut between these divides no block."""


def trace_model(
    maker: Maker,
    input_spec: InputSpec,
    classes: int,
    units: Sequence[str] | None = None,
) -> Model:
    """Trace, measure and divide a network; raises `InputError` naming the failing line.

    Args:
        maker: constructs the network.
        input_spec: shape and type of the samples.
        classes: number of values the network returns for a sample, or for each token of a sample.
        units: names of the modules that begin a unit; None leaves the choice to this module.
    """
    traced = _trace_network(maker, input_spec, units)
    operations = _find_operations(maker, traced)
    cuts = (
        _choose_cuts(operations) if units is None else _cuts_before(operations, units)
    )
    bounds = [0, *cuts, len(operations.nodes)]
    unit_nodes = []
    for begin, end in itertools.pairwise(bounds):
        unit_nodes.append(operations.nodes[begin:end])
    names = _name_units(operations, unit_nodes, units)
    nodes_by_unit = dict(zip(names, unit_nodes, strict=True))
    return _make_model(maker, operations, nodes_by_unit, input_spec, classes)


def _name_units(
    operations: _Operations,
    unit_nodes: Sequence[Sequence[fx.Node]],
    units: Sequence[str] | None,
) -> list[str]:
    """Return a name for each unit: a module named by the user in ``units``, or the module of the main operations."""
    names = []
    for nodes in unit_nodes:
        names.append(_unit_name(nodes, operations))
    names = _unique_names(names)
    if units is None:
        return names
    # The unit behind a cut has the name of the module that begins there. If the first named module begins with the
    # network, it makes no cut, and there is one named module more than there are cuts.
    cuts = len(unit_nodes) - 1
    names_behind_cuts = units[len(units) - cuts :]
    return [names[0], *names_behind_cuts]


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return distinct names: the second and third call of a module "conv" become "conv@1" and "conv@2"."""
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        earlier_calls = counts[name]
        unique.append(f"{name}@{earlier_calls}" if earlier_calls else name)
        counts[name] += 1
    return unique


def _trace_network(
    maker: Maker, input_spec: InputSpec, units: Sequence[str] | None
) -> TracedNetwork:
    """Trace a network by torch.fx, or by the slower torch.export if torch.fx fails."""
    try:
        return trace_by_fx(maker, input_spec, units)
    except InputError as fx_error:
        # Imported here, since most networks do not need it.
        from testbed.ml.models.export_tracing import trace_by_export

        try:
            return trace_by_export(maker, input_spec)
        except InputError as export_error:
            # Both reasons: the user may mend either of them.
            text = f"{fx_error.text}; {export_error.text}"
            raise InputError(text, MODEL_FILE_KEY) from None


@dataclass
class _Operations:
    """The operations of a traced network, in the order of execution, and the tensors crossing the cuts in between.

    Here, a cut is the index of an operation: cut i lies between the operations i - 1 and i.
    """

    traced: TracedNetwork
    nodes: list[fx.Node]
    """The operations: nodes that compute one or more tensors from the samples."""
    input: fx.Node
    """The placeholder of the samples."""
    maker: Maker
    """Constructs the network; errors name its file."""
    main_counts: list[int] = field(init=False)
    """For each operation, the number of main operations up to this operation, inclusive."""
    normalisations: list[set[str]] = field(init=False)
    """For each operation, the paths of the modules with running statistics that it calls."""

    def __post_init__(self) -> None:
        self._nonlocal_nodes = {self.input, *self.nodes}
        self.main_counts = []
        self.normalisations = []
        main_operations = 0
        for node in self.nodes:
            if self.measures[0][node.name].has_flops:
                main_operations += 1
            self.main_counts.append(main_operations)
            nodes = self.with_local_nodes([node])
            self.normalisations.append(_called_normalisations(self.root, nodes))

    @property
    def root(self) -> nn.Module:
        """The network."""
        return self.traced.root

    @property
    def measures(self) -> tuple[dict[str, Measure], ...]:
        """Measurements by node name, for the small and for the large batch."""
        return self.traced.measures

    def values(self, node: fx.Node) -> tuple[Any, Any]:
        """Return the results of a node for the small and for the large batch."""
        small, large = self.measures
        return small[node.name].value, large[node.name].value

    def with_local_nodes(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return nodes together with all required local nodes, in the order of the graph."""
        needed: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            if self._is_size(node):
                # A size is a number in the unit's graph (`_copy_size`), and needs no other node.
                continue
            for source in node.all_input_nodes:
                if source not in self._nonlocal_nodes:
                    pending.append(source)
        return [node for node in self.traced.graph.nodes if node in needed]

    def _is_size(self, node: fx.Node) -> bool:
        small, _ = self.values(node)
        return is_plain(small)

    def inputs_of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the other operations whose tensors some operations need, and the samples before these if needed."""
        sources: set[fx.Node] = set()
        for node in self.with_local_nodes(nodes):
            if not self._is_size(node):
                sources.update(node.all_input_nodes)
        inputs = sources.difference(nodes)
        return [node for node in (self.input, *self.nodes) if node in inputs]

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return the operations before a cut whose tensors are needed after the cut, the samples included."""
        before = {self.input, *self.nodes[:cut]}
        inputs = self.inputs_of(self.nodes[cut:])
        return [node for node in inputs if node in before]

    def has_several_tensors(self, cut: int) -> bool:
        """Whether several tensors cross a cut, not counting samples that cross for local nodes only, such as masks."""
        sources: set[fx.Node] = set()
        for node in self.nodes[cut:]:
            sources.update(node.all_input_nodes)
        count = 0
        for node in self.crossing(cut):
            is_for_local_nodes = node is self.input and node not in sources
            if not is_for_local_nodes:
                count += 1
        return count > 1

    def can_cross(self, node: fx.Node) -> bool:
        """Whether a node's value can cross a cut: a tensor of numbers, (samples, ...)."""
        values = self.values(node)
        for value, size in zip(values, BATCH_SIZES, strict=True):
            if not isinstance(value, torch.Tensor):
                return False
            # Samples of integers cross as float32, which is exact up to 2^24: beyond the vocabulary of any model.
            if value.dtype != torch.float32 and node is not self.input:
                return False
            # `Segment` flattens and joins the axes after that of the samples.
            if value.ndim < 2 or value.shape[0] != size:
                return False
            # Plans count the bytes of one sample, which must not depend on the size of the batch.
            if value.shape[1:] != values[0].shape[1:]:
                return False
        return True

    def shape(self, node: fx.Node) -> Shape:
        """Return the shape of a node's value for one sample, without the axis of the samples."""
        small, _ = self.values(node)
        return tuple(small.shape[1:])


def _find_operations(maker: Maker, traced: TracedNetwork) -> _Operations:
    """Find the operations of a traced network; raises `InputError` unless the last one has the network's result."""
    # The graph has one placeholder and one output; of other kinds, this dictionary has the last node.
    node_by_kind = {node.op: node for node in traced.graph.nodes}
    samples = node_by_kind["placeholder"]
    result = node_by_kind["output"].args[0]
    dependent = _dependent_nodes(traced, samples)
    masks = _mask_nodes(traced, samples, dependent)
    operations = dependent - masks - {samples}
    nodes = [node for node in traced.graph.nodes if node in operations]
    if not nodes or result is not nodes[-1]:
        where = usercode.file_of(maker.code.module)
        if nodes:
            where = source_line(nodes[-1], maker)
        is_group = isinstance(result, tuple | list | dict)
        actual = "several values" if is_group else "a tensor that depends on no sample"
        text = f"forward returns {actual}: it must return one tensor, one value for each class"
        raise InputError(f"{where}: {text}", MODEL_FILE_KEY)
    return _Operations(traced, nodes, samples, maker)


def _dependent_nodes(traced: TracedNetwork, samples: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors depend on the samples, the placeholder of the samples included."""
    small, _ = traced.measures
    dependent = {samples}
    for node in traced.graph.nodes:
        is_call = node.op.startswith("call")
        if not is_call or dependent.isdisjoint(node.all_input_nodes):
            continue
        if not is_plain(small[node.name].value):
            dependent.add(node)
    return dependent


def _mask_nodes(
    traced: TracedNetwork, samples: fx.Node, dependent: Collection[fx.Node]
) -> set[fx.Node]:
    """Return nodes computed from samples without weights and without gradients: masks, positions, input tokens.

    These are local nodes: each unit computes them again from the samples. As operations, the mask of a language model
    would cross every cut as a second tensor, and prevent the cut. ``dependent`` are the `_dependent_nodes`.
    """
    masks: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.target is entry:
            # One of several inputs: a part of the samples' row.
            masks.add(node)
            continue
        sources = [each for each in node.all_input_nodes if each in dependent]
        has_mask_sources = masks.union([samples]).issuperset(sources)
        if sources and has_mask_sources and _is_mask(traced, node, sources):
            masks.add(node)
    return masks


def _is_mask(traced: TracedNetwork, node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Return whether a node is a mask; ``sources`` are the node's inputs depending on samples: samples and masks."""
    small, _ = traced.measures
    if node.op == "output" or small[node.name].has_flops:
        return False
    if _used_parameters(traced.root, [node, *node.all_input_nodes]):
        return False
    if not _is_float(traced, node):
        return True
    # Floats made of float samples are activations: normalised pixels, for example.
    for source in sources:
        is_input = source.op == "placeholder" or source.target is entry
        if is_input and _is_float(traced, source):
            return False
    return True


def _is_float(traced: TracedNetwork, node: fx.Node) -> bool:
    """Return whether a node's value is a tensor of floats, or is no tensor but a group of tensors."""
    small, _ = traced.measures
    value = small[node.name].value
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _named_parameters(
    root: nn.Module, nodes: Iterable[fx.Node]
) -> dict[str, nn.Parameter]:
    """Return the parameters used by nodes, by all of their names in the network.

    A tied weight has several names, one for each module that contains the weight.
    """
    parameters: dict[str, nn.Parameter] = {}
    for node in nodes:
        path = str(node.target)
        if node.op == "call_module":
            module = root.get_submodule(path)
            parameters |= module.named_parameters(path, remove_duplicate=False)
        elif node.op == "get_attr":
            value = operator.attrgetter(path)(root)
            if isinstance(value, nn.Parameter):
                parameters[path] = value
    return parameters


def _used_parameters(root: nn.Module, nodes: Iterable[fx.Node]) -> list[nn.Parameter]:
    """Return the parameters used by nodes, each once."""
    # By identity: tensors compare element by element.
    by_identity: dict[int, nn.Parameter] = {}
    for parameter in _named_parameters(root, nodes).values():
        by_identity[id(parameter)] = parameter
    return list(by_identity.values())


def _called_normalisations(root: nn.Module, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the paths of the modules with running statistics called by nodes."""
    called: set[int] = set()
    for node in nodes:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            for each in module.modules():
                called.add(id(each))
    paths = set()
    # A module with several paths appears only once in `named_modules`, so that equal modules have equal paths here.
    for path, module in root.named_modules():
        if id(module) in called and _has_statistics(module):
            paths.add(path)
    return paths


def _has_statistics(module: nn.Module) -> bool:
    # The common base of torch's batch and instance normalisations, which has no public name.
    is_normalisation = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_normalisation and module.running_mean is not None


def _tied_weights(
    operations: _Operations, unit_nodes: Sequence[Sequence[fx.Node]]
) -> tuple[TiedWeight, ...]:
    """Return the trained weights shared by several units."""
    # By identity, as in `_used_parameters`.
    names: dict[int, list[str]] = {}
    weights: dict[int, nn.Parameter] = {}
    for index, nodes in enumerate(unit_nodes):
        all_nodes = operations.with_local_nodes(nodes)
        for name, weight in _named_parameters(operations.root, all_nodes).items():
            # The name of the unit's copy in the module of `Model.build`.
            names.setdefault(id(weight), []).append(f"{index}.{name}")
            weights[id(weight)] = weight
    tied_weights = []
    for identity, weight in weights.items():
        tied = TiedWeight(tuple(names[identity]), weight.numel())
        if weight.requires_grad and len(tied.units) > 1:
            tied_weights.append(tied)
    return tuple(tied_weights)


# Cutting


def _choose_cuts(operations: _Operations) -> list[int]:
    """Return a cut between each two successive main operations, where a cut is possible."""
    cuts_by_main_count: dict[int, list[int]] = {}
    for cut in range(1, len(operations.nodes)):
        main_count = operations.main_counts[cut - 1]
        cuts_by_main_count.setdefault(main_count, []).append(cut)
    chosen_cuts: list[int] = []
    begin = 0
    for main_count, cuts in cuts_by_main_count.items():
        # Before the first main operation and after the last there is nothing to divide.
        if main_count in (0, operations.main_counts[-1]):
            continue
        narrowest = _narrowest_cut(operations, begin, cuts)
        if narrowest is not None:
            chosen_cuts.append(narrowest)
            begin = narrowest
    return chosen_cuts


def _narrowest_cut(
    operations: _Operations, begin: int, cuts: Sequence[int]
) -> int | None:
    """Return the last of the possible cuts with the fewest crossing values; None if no cut is possible.

    ``begin`` is the first operation of the unit that would end at the cut.
    """
    narrowest: int | None = None
    fewest_values = 0
    for cut in cuts:
        if _reason_against_cut(operations, begin, cut):
            continue
        if _divides_block(operations, cut):
            continue
        values = _crossing_values(operations, cut)
        # Of equally narrow cuts the last: an activation, which keeps the size, stays in the unit of its layer.
        if narrowest is None or values <= fewest_values:
            narrowest = cut
            fewest_values = values
    return narrowest


def _undivided_reason(operations: _Operations, begin: int, end: int) -> str:
    """Return the first reason against a cut between main operations of a unit, with the line; empty without one.

    The unit has the operations from ``begin`` to ``end``, exclusive.
    """
    main_counts = operations.main_counts
    for cut in range(begin + 1, end):
        main_count = main_counts[cut - 1]
        is_between = main_counts[begin] <= main_count < main_counts[end - 1]
        if not is_between:
            continue
        where = source_line(operations.nodes[cut], operations.maker)
        reason = _reason_against_cut(operations, begin, cut)
        if reason:
            return f"{where}: no unit can begin here: {reason}"
        if _divides_block(operations, cut):
            return f"{where}: several tensors cross here, inside a module that is kept whole: name it in `units`"
    return ""


def _crossing_values(operations: _Operations, cut: int) -> int:
    """Return the number of values crossing a cut for one sample."""
    values = 0
    for node in operations.crossing(cut):
        values += math.prod(operations.shape(node))
    return values


def _reason_against_cut(operations: _Operations, begin: int, cut: int) -> str | None:
    """Explain why the unit beginning at operation ``begin`` cannot end at a cut; None if it can."""
    crossing = operations.crossing(cut)
    unit = operations.nodes[begin:cut]
    outputs = [node for node in crossing if node in unit]
    # A unit is a module with one result.
    if len(outputs) != 1:
        return f"the unit before it computes {len(outputs)} tensors that are read later, and a unit can have one output"
    if not all(operations.can_cross(node) for node in crossing):
        return "the tensor that crosses there must be float32 with the samples along its first axis"
    # Each unit would have a copy of the normalisation, with the statistics of its own calls only.
    before = set[str]().union(*operations.normalisations[:cut])
    after = set[str]().union(*operations.normalisations[cut:])
    if before & after:
        return "a normalisation with running statistics is used on both sides of it, and each unit has its own"
    return None


def _divides_block(operations: _Operations, cut: int) -> bool:
    """Return whether several tensors cross a cut inside a module, which is a block that stays whole."""
    if not operations.has_several_tensors(cut):
        return False
    before = _calling_modules(operations.nodes[cut - 1])
    after = _calling_modules(operations.nodes[cut])
    # The common beginning of both paths are the modules around the cut; the lengths may differ.
    for path, other in zip(before, after, strict=False):
        module = operations.root.get_submodule(path)
        if path == other and not isinstance(module, _CONTAINERS):
            return True
    return False


def _calling_modules(node: fx.Node) -> list[str]:
    """Return the paths of the modules around a node, outermost first, without the module called by the node."""
    # Both tracers store the path and the class of each module.
    stack = node.meta.get("nn_module_stack") or {}
    paths: list[str] = [path for path, _ in stack.values()]
    if node.op != "call_module":
        return paths
    return [path for path in paths if path != node.target]


def _module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the modules around a node, outermost first, and of the module called by the node."""
    paths = _calling_modules(node)
    if node.op == "call_module":
        paths.append(str(node.target))
    return paths


def _cuts_before(operations: _Operations, units: Sequence[str]) -> list[int]:
    """Return the cuts before the named modules; the first unit begins with the network.

    Raises `InputError` for a module that the network does not call, and for one at which no unit can begin.
    """
    key = (MODEL_FILE_KEY[0], "units")
    cuts: list[int] = []
    for name in units:
        cut = _first_operation(operations, name)
        if cut is None:
            known = _called_modules(operations)
            text = f"the network calls no module '{name}': name one of {known}, or a module containing one"
            raise InputError(text, key)
        if cut == 0:
            # The unit that begins with the network needs no cut.
            continue
        begin = cuts[-1] if cuts else 0
        if cut <= begin:
            raise InputError(
                f"'{name}' must come after the previously named modules", key
            )
        reason = _reason_against_cut(operations, begin, cut)
        if reason:
            where = source_line(operations.nodes[cut], operations.maker)
            raise InputError(f"{where}: no unit can begin at '{name}': {reason}", key)
        cuts.append(cut)
    return cuts


def _first_operation(operations: _Operations, name: str) -> int | None:
    """Return the index of the first operation within a module; None if the network does not call the module."""
    for index, node in enumerate(operations.nodes):
        for path in _module_paths(node):
            if path == name or path.startswith(f"{name}."):
                return index
    return None


def _called_modules(operations: _Operations) -> str:
    """List the modules called by the network, for an error."""
    # A dictionary, which keeps the order of the calls and drops repeated ones.
    paths = {}
    for node in operations.nodes:
        if node.op == "call_module":
            paths[str(node.target)] = True
    return ", ".join(paths)


# Units


@dataclass(frozen=True)
class TracedUnits:
    """Builds the units of a traced network, each as a separate module: the `Builder` of a `Model`."""

    maker: Maker
    graphs: tuple[fx.Graph, ...] = field(compare=False)
    """The graph of each unit."""
    constants: Mapping[str, torch.Tensor] = field(compare=False)
    """`TracedNetwork.constants`."""

    def network(self, seed: int) -> nn.Module:
        """Build the whole network by the user's function, from the seed."""
        return seeded_network(self.maker, seed)

    def __call__(self, first: int, last: int, seed: int) -> list[nn.Module]:
        """Build units ``first`` to ``last`` (exclusive): the user's function builds all, and the others are dropped.

        All weights are drawn, because the user's function draws them one after the other from one generator.
        """
        root = self.network(seed)
        state_names = root.state_dict().keys()
        # Graphs refer to these tensors as attributes of the network.
        for name, value in self.constants.items():
            setattr(root, name, value)
        units: list[nn.Module] = []
        for graph in self.graphs[first:last]:
            unit = fx.GraphModule(root, graph)
            _hide_constants(unit, state_names)
            units.append(unit)
        return units


def _hide_constants(unit: nn.Module, state_names: Collection[str]) -> None:
    """Exclude buffers from a unit's state dictionary, unless named in ``state_names``, the state of the user's network.

    torch.fx makes a buffer of each tensor that a graph reads, also of constants.
    """
    for name, _ in unit.named_buffers():
        if name in state_names:
            continue
        owner, _, buffer = name.rpartition(".")
        module = unit.get_submodule(owner)
        module._non_persistent_buffers_set.add(buffer)


def _make_model(
    maker: Maker,
    operations: _Operations,
    nodes_by_unit: Mapping[str, Sequence[fx.Node]],
    input_spec: InputSpec,
    classes: int,
) -> Model:
    """Return the model with the given operations in each unit, by unit name; raises `InputError` for unfit shapes."""
    unit_nodes = list(nodes_by_unit.values())
    # Node -> index of the unit whose output the node is.
    unit_of = {operations.input: INPUT}
    units = []
    graphs = []
    for index, (name, nodes) in enumerate(nodes_by_unit.items()):
        inputs = operations.inputs_of(nodes)
        output = _unit_output(operations, nodes, unit_nodes[index + 1 :])
        unit_of[output] = index
        sources = tuple(unit_of[node] for node in inputs)
        # `Unit.reads` is empty for the usual case, a unit that reads the unit before it.
        reads = sources if sources != (index - 1,) else ()
        shapes = [operations.shape(node) for node in inputs]
        # Several inputs of a traced unit may have any shapes, so they cannot be joined along their channels.
        input_shape = joined_shape(shapes, flatten=True)
        measured = _measure_unit(operations, nodes, inputs, output)
        unit = Unit(name, (measured,), input_shape, reads, flattens_inputs=True)
        units.append(unit)
        graphs.append(_unit_graph(operations, nodes, inputs, output))
    _, _, file_name = usercode.file_of(maker.code.module).rpartition("/")
    try:
        return Model(
            name=file_name.removesuffix(".py"),
            input=input_spec.shape,
            classes=classes,
            units=tuple(units),
            integers=input_spec.integers,
            fields=input_spec.fields,
            builder=TracedUnits(maker, tuple(graphs), operations.traced.constants),
            tied_weights=_tied_weights(operations, unit_nodes),
        )
    except ValueError as error:
        raise InputError(str(error), MODEL_FILE_KEY) from None


def _unit_output(
    operations: _Operations,
    nodes: Sequence[fx.Node],
    later_units: Sequence[Sequence[fx.Node]],
) -> fx.Node:
    """Return the one operation of a unit, ``nodes``, read by later units; in the last unit, the last operation.

    The operation need not be the unit's last: operations whose result nobody reads may follow.
    """
    inputs: set[fx.Node] = set()
    for later_nodes in later_units:
        inputs.update(operations.inputs_of(later_nodes))
    for node in nodes:
        if node in inputs:
            return node
    return nodes[-1]


def _measure_unit(
    operations: _Operations,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    output: fx.Node,
) -> MeasuredUnit:
    """Return the sizes and the cost of a unit for one sample, and the layers of a unit made of known layers."""
    all_nodes = operations.with_local_nodes(nodes)
    trained_values = 0
    matrix_values = 0
    frozen_values = 0
    for parameter in _used_parameters(operations.root, all_nodes):
        if not parameter.requires_grad:
            frozen_values += parameter.numel()
            continue
        trained_values += parameter.numel()
        if parameter.ndim > 1:
            matrix_values += parameter.numel()
    batch_cost = Cost()
    batch_values = 0
    min_samples = 1
    for node in nodes:
        measure = operations.measures[0][node.name]
        batch_cost += measure.cost
        batch_values += measure.created_values
        min_samples = max(min_samples, measure.min_samples)
    # Everything but the bytes of weights is proportional to the number of samples.
    samples, _ = BATCH_SIZES
    per_sample = 1 / samples
    cost = batch_cost.scaled(flops=per_sample, accessed=per_sample, weights=1)
    begin = operations.nodes.index(nodes[0])
    return MeasuredUnit(
        output_shape=operations.shape(output),
        trained_values=trained_values,
        matrix_values=matrix_values,
        activation_values=batch_values // samples,
        forward_cost=cost,
        undivided_reason=_undivided_reason(operations, begin, begin + len(nodes)),
        smallest_batch=min_samples,
        known_layers=_describe_unit(operations, nodes, inputs, output, trained_values),
        frozen_values=frozen_values,
    )


def _describe_unit(
    operations: _Operations,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    output: fx.Node,
    trained_values: int,
) -> KnownLayers:
    """Return the layers of a unit consisting of a sequence of known layers; empty for any other unit."""
    # In a sequence, each operation has one tensor for the next operation, and the last one has the output.
    if output is not nodes[-1]:
        return ()
    for node in nodes:
        small, _ = operations.values(node)
        if not isinstance(small, torch.Tensor):
            return ()
    return describe_layers(
        operations.root, nodes, inputs, operations.shape, trained_values
    )


def _unit_name(nodes: Sequence[fx.Node], operations: _Operations) -> str:
    """Return the innermost module around all main operations of a unit, or around the first one."""
    small, _ = operations.measures
    main_nodes = [node for node in nodes if small[node.name].has_flops]
    if not main_nodes:
        main_nodes = list(nodes)
    paths_of_nodes = [_module_paths(node) for node in main_nodes]
    common_paths = []
    # Not strict: the operations are in modules of different depth.
    for paths_at_depth in zip(*paths_of_nodes, strict=False):
        if len(set(paths_at_depth)) == 1:
            common_paths.append(paths_at_depth[0])
    # An operation of the network's own `forward` is in no module; then its name in torch.fx is used.
    paths = common_paths or paths_of_nodes[0] or [main_nodes[0].name]
    return paths[-1]


def _unit_graph(
    operations: _Operations,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    output: fx.Node,
) -> fx.Graph:
    """Return a graph of a unit's operations and the required local nodes, with a placeholder for each input."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"read{place}")
    # The unit reads the number of samples from the first input, but any would do: axis 0 of all is that of the samples.
    first_input = copies[inputs[0]]
    samples, _ = operations.values(operations.input)
    if samples.dtype != torch.float32 and operations.input in copies:
        # Samples of integers cross a cut as float32.
        converted = graph.call_method("to", (copies[operations.input], samples.dtype))
        copies[operations.input] = converted

    def copy_of(node: fx.Node) -> Any:
        if node not in copies:
            if node.op == "get_attr" or node.target is choose_by_mode:
                # Weights, and numbers that depend on the mode of the unit's module.
                copies[node] = graph.node_copy(node, copy_of)
            else:
                values = operations.values(node)
                copies[node] = _copy_size(operations, node, values, first_input, graph)
        return copies[node]

    for node in operations.with_local_nodes(nodes):
        small, _ = operations.values(node)
        # Sizes are copied where a node uses them.
        if not is_plain(small):
            copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[output])
    return graph


def _copy_size(
    operations: _Operations,
    node: fx.Node,
    values: tuple[Any, Any],
    first_input: fx.Node,
    graph: fx.Graph,
) -> Any:
    """Return a size as a number, or as a node multiplying the number of samples in ``first_input``.

    ``values`` are the size, or a group of sizes, for the small and for the large batch. Raises `InputError` for a size
    that is no multiple of the number of samples, but depends on it.
    """
    small, large = values
    if isinstance(small, tuple | list) and len(small) == len(large):
        sizes = []
        for pair in zip(small, large, strict=True):
            sizes.append(_copy_size(operations, node, pair, first_input, graph))
        return tuple(sizes)
    if small == large:
        return small
    # Another function than a multiple, such as the number of samples plus 1, gives different factors for two sizes.
    small_batch, large_batch = BATCH_SIZES
    factor = small // small_batch if isinstance(small, int) else 0
    if small != factor * small_batch or large != factor * large_batch:
        where = source_line(node, operations.maker)
        raise InputError(
            f"{where}: depends on the number of samples in an unsupported way",
            MODEL_FILE_KEY,
        )
    samples = graph.call_method("size", (first_input, 0))
    if factor == 1:
        return samples
    return graph.call_function(operator.mul, (samples, factor))
