"""A traced network as a chain of units: which nodes are steps, where cuts fall, and what each unit costs.

The tracers (`testbed.ml.models.tracer` and `testbed.ml.models.exported`) return a graph of torch.fx with the result of
every node for two batch sizes. Nodes that compute a tensor from the samples are steps. Cuts divide the row of steps
into units: a unit begins where torch counts work, so normalisations and activations belong to the layer before them.

A cut is placed where one tensor crosses. If several tensors cross (a skip, a route), a cut is placed only between
modules called by the network itself or listed in a `Sequential`, so a residual block in a module stays whole.
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
from testbed.ml.models.described import Described, describe_layers
from testbed.ml.models.making import KEY, CountedUnit, Maker
from testbed.ml.models.shapes import INPUT, Shape
from testbed.ml.models.tracer import (
    BATCHES,
    STACKS,
    Measure,
    Traced,
    by_mode,
    is_plain,
    seeded_network,
    source_line,
    trace_by_fx,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *STACKS)
"""Modules that only hold other modules, so a cut within one of them divides no block."""


def trace_model(
    maker: Maker,
    input_spec: InputSpec,
    classes: int,
    units: Sequence[str] | None = None,
) -> Model:
    """Trace, measure and cut a network; raises `InputError` naming the failing line.

    Args:
        maker: constructs the network.
        input_spec: shape and type of the samples.
        classes: number of values the network returns for a sample, or for each token of a sample.
        units: names of the modules that begin a unit; None leaves the choice to this module.
    """
    traced = _trace_network(maker, input_spec, units)
    steps = _make_steps(maker, traced)
    cuts = _choose_cuts(steps) if units is None else _cuts_before(steps, units)
    edges = [0, *cuts, len(steps.nodes)]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        pieces.append(steps.nodes[begin:end])
    names = _name_units(steps, pieces, units)
    named_pieces = dict(zip(names, pieces, strict=True))
    return _make_chain(maker, steps, named_pieces, input_spec, classes)


def _name_units(
    steps: _Steps, pieces: Sequence[Sequence[fx.Node]], units: Sequence[str] | None
) -> list[str]:
    """Return a name for each unit: a module named by the user, or the module in which the unit's work begins."""
    names = []
    for piece in pieces:
        names.append(_unit_name(piece, steps))
    names = _unique_names(names)
    if units is None:
        return names
    # The unit behind a cut has the name of the module that begins there. The first named module may begin with the
    # network: then it makes no cut, and there is a name more than there are cuts.
    cuts = len(pieces) - 1
    return [names[0], *units[len(units) - cuts :]]


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return distinct names: the second and third call of a module "conv" become "conv@1" and "conv@2"."""
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        earlier = counts[name]
        unique.append(f"{name}@{earlier}" if earlier else name)
        counts[name] += 1
    return unique


def _trace_network(
    maker: Maker, input_spec: InputSpec, units: Sequence[str] | None
) -> Traced:
    """Trace a network by torch.fx, or by the slower torch.export if torch.fx fails."""
    try:
        return trace_by_fx(maker, input_spec, units)
    except InputError as fx_error:
        # Imported here, since most networks do not need it.
        from testbed.ml.models.exported import trace_by_export

        try:
            return trace_by_export(maker, input_spec)
        except InputError as export_error:
            # Both reasons: either of them may be easier to mend.
            text = f"{fx_error.text}; {export_error.text}"
            raise InputError(text, KEY) from None


@dataclass
class _Steps:
    """The steps of a traced network, in the order of execution, with their measurements.

    A cut is an index: cut i lies between the steps i - 1 and i.
    """

    traced: Traced
    nodes: list[fx.Node]
    """The steps: nodes that compute one or more tensors from the samples."""
    input: fx.Node
    """The placeholder of the samples."""
    maker: Maker
    work: list[int] = field(init=False)
    """Number of steps with counted FLOPs up to each step, inclusive."""
    statistics: list[set[str]] = field(init=False)
    """Paths of the modules with running statistics that each step calls."""

    def __post_init__(self) -> None:
        self._made = {self.input, *self.nodes}
        self.work = []
        self.statistics = []
        working_steps = 0
        for node in self.nodes:
            if self.runs[0][node.name].has_work:
                working_steps += 1
            self.work.append(working_steps)
            own_nodes = self.with_local_nodes([node])
            self.statistics.append(_with_statistics(self.root, own_nodes))

    @property
    def root(self) -> nn.Module:
        """The network."""
        return self.traced.root

    @property
    def runs(self) -> tuple[dict[str, Measure], ...]:
        """Measurements by node, for both batch sizes."""
        return self.traced.runs

    def values(self, node: fx.Node) -> tuple[Any, Any]:
        """Return the results of a node for both batches."""
        small, large = self.runs
        return small[node.name].value, large[node.name].value

    def is_local(self, node: fx.Node) -> bool:
        """Whether each unit computes a node itself: a value independent of the samples, a size, or a mask."""
        return node is not self.input and node not in self._made

    def with_local_nodes(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return nodes and the local nodes needed by the nodes, in the order of the graph."""
        wanted: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node in wanted:
                continue
            wanted.add(node)
            if self._is_size(node):
                # A size is a number in the unit's graph, and needs nothing.
                continue
            for read in node.all_input_nodes:
                if self.is_local(read):
                    waiting.append(read)
        return [node for node in self.traced.graph.nodes if node in wanted]

    def _is_size(self, node: fx.Node) -> bool:
        small, _ = self.values(node)
        return is_plain(small)

    def read_by(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the other steps read by some nodes, in order, preceded by the samples if the nodes read samples."""
        read: set[fx.Node] = set()
        for node in self.with_local_nodes(nodes):
            if not self._is_size(node):
                read.update(node.all_input_nodes)
        outside = read.difference(nodes)
        return [node for node in (self.input, *self.nodes) if node in outside]

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return the steps before a cut whose values are read after the cut, the samples included."""
        before = {self.input, *self.nodes[:cut]}
        read_after = self.read_by(self.nodes[cut:])
        return [node for node in read_after if node in before]

    def has_several_tensors(self, cut: int) -> bool:
        """Whether several tensors cross a cut, not counting samples crossing for masks only."""
        read: set[fx.Node] = set()
        for node in self.nodes[cut:]:
            read.update(node.all_input_nodes)
        count = 0
        for node in self.crossing(cut):
            is_for_masks = node is self.input and node not in read
            if not is_for_masks:
                count += 1
        return count > 1

    def can_cross(self, node: fx.Node) -> bool:
        """Whether a node's value can cross a cut: a numeric tensor with a row for each sample."""
        values = self.values(node)
        for value, size in zip(values, BATCHES, strict=True):
            if not isinstance(value, torch.Tensor):
                return False
            # Samples of integers travel as float32, which is exact up to 2^24: beyond the vocabulary of any model.
            if value.dtype != torch.float32 and node is not self.input:
                return False
            # `Segment` flattens and joins crossing tensors behind the axis of the samples.
            if value.ndim < 2 or value.shape[0] != size:
                return False
            # Plans count the bytes of a row, which therefore must not depend on the batch.
            if value.shape[1:] != values[0].shape[1:]:
                return False
        return True

    def shape(self, node: fx.Node) -> Shape:
        """Return the shape of a node's value for one sample, without the axis of the samples."""
        small, _ = self.values(node)
        return tuple(small.shape[1:])


def _make_steps(maker: Maker, traced: Traced) -> _Steps:
    """Find the steps of a traced network; raises `InputError` unless the last step makes the network's result."""
    # A traced network has one placeholder and one output, which are the last of their kind as well.
    by_kind = {node.op: node for node in traced.graph.nodes}
    samples = by_kind["placeholder"]
    result = by_kind["output"].args[0]
    dependent = _dependent_nodes(traced, samples)
    masks = _mask_nodes(traced, samples, dependent)
    computed = dependent - masks - {samples}
    nodes = [node for node in traced.graph.nodes if node in computed]
    if not nodes or result is not nodes[-1]:
        where = usercode.file_of(maker.code.module)
        if nodes:
            where = source_line(nodes[-1], maker)
        is_group = isinstance(result, tuple | list | dict)
        given = "several values" if is_group else "a tensor that depends on no sample"
        text = f"forward returns {given}: it must return one tensor, one value for each class"
        raise InputError(f"{where}: {text}", KEY)
    return _Steps(traced, nodes, samples, maker)


def _dependent_nodes(traced: Traced, samples: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors depend on the samples, the placeholder of the samples included."""
    small, _ = traced.runs
    dependent = {samples}
    for node in traced.graph.nodes:
        is_call = node.op.startswith("call")
        if not is_call or dependent.isdisjoint(node.all_input_nodes):
            continue
        if not is_plain(small[node.name].value):
            dependent.add(node)
    return dependent


def _mask_nodes(
    traced: Traced, samples: fx.Node, dependent: Collection[fx.Node]
) -> set[fx.Node]:
    """Return nodes computed from samples without weights and without gradients: masks, positions, input tokens.

    Each unit computes such nodes from the samples again. If they were steps, the mask of a language model would cross
    every cut as a second tensor, and prevent it.
    """
    masks: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.target is entry:
            # One of several inputs: a slice of the samples' row.
            masks.add(node)
            continue
        read = [each for each in node.all_input_nodes if each in dependent]
        has_only_masks = masks.union([samples]).issuperset(read)
        if read and has_only_masks and _is_mask(traced, node, read):
            masks.add(node)
    return masks


def _is_mask(traced: Traced, node: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Return whether a node computed from samples and masks is a mask as well; ``read`` are these inputs."""
    small, _ = traced.runs
    if node.op == "output" or small[node.name].has_work:
        return False
    if _used_parameters(traced.root, [node, *node.all_input_nodes]):
        return False
    if not _is_float(traced, node):
        return True
    # Floats made of float samples are activations: normalised pixels, for example.
    for each in read:
        is_input = each.op == "placeholder" or each.target is entry
        if is_input and _is_float(traced, each):
            return False
    return True


def _is_float(traced: Traced, node: fx.Node) -> bool:
    """Return whether a node's value is a tensor of floats, or a group of tensors."""
    small, _ = traced.runs
    value = small[node.name].value
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _named_parameters(
    root: nn.Module, nodes: Iterable[fx.Node]
) -> dict[str, nn.Parameter]:
    """Return the parameters used by nodes under all of their names.

    A tied weight has several names, one for each module that holds it.
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


def _with_statistics(root: nn.Module, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the modules with running statistics called by nodes, by their first path."""
    called: set[int] = set()
    for node in nodes:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            for each in module.modules():
                called.add(id(each))
    paths = set()
    # `named_modules` gives a module that has several paths once, by the first.
    for path, module in root.named_modules():
        if id(module) in called and _has_statistics(module):
            paths.add(path)
    return paths


def _has_statistics(module: nn.Module) -> bool:
    # The common base of torch's batch and instance normalisations, which has no public name.
    is_normalisation = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_normalisation and module.running_mean is not None


def _tied_weights(
    steps: _Steps, pieces: Sequence[Sequence[fx.Node]]
) -> tuple[TiedWeight, ...]:
    """Return the trained weights shared by several units."""
    # By identity, as in `_used_parameters`.
    names: dict[int, list[str]] = {}
    weights: dict[int, nn.Parameter] = {}
    for index, piece in enumerate(pieces):
        nodes = steps.with_local_nodes(piece)
        for name, weight in _named_parameters(steps.root, nodes).items():
            # The name of the copy in the module of `Model.build`, whose children are the units.
            names.setdefault(id(weight), []).append(f"{index}.{name}")
            weights[id(weight)] = weight
    shared = []
    for key, weight in weights.items():
        tied = TiedWeight(tuple(names[key]), weight.numel())
        if weight.requires_grad and len(tied.units) > 1:
            shared.append(tied)
    return tuple(shared)


# Cutting


def _choose_cuts(steps: _Steps) -> list[int]:
    """Return a cut between each two successive steps with work, where the rules for cuts permit one."""
    places_after_work: dict[int, list[int]] = {}
    for place in range(1, len(steps.nodes)):
        work = steps.work[place - 1]
        places_after_work.setdefault(work, []).append(place)
    cuts: list[int] = []
    begin = 0
    for work, places in places_after_work.items():
        # Before the first work and after the last there is nothing to divide.
        if work in (0, steps.work[-1]):
            continue
        cut = _narrowest_place(steps, begin, places)
        if cut is not None:
            cuts.append(cut)
            begin = cut
    return cuts


def _narrowest_place(steps: _Steps, begin: int, places: Sequence[int]) -> int | None:
    """Return the last of the possible places with the fewest crossing values; None if no place is possible.

    ``begin`` is the first step of the unit that would end at the place.
    """
    narrowest: int | None = None
    fewest = 0
    for place in places:
        if _reason_against_cut(steps, begin, place) or _is_within_module(steps, place):
            continue
        values = _crossing_values(steps, place)
        # Of equally narrow places the last: an activation, which keeps the size, stays in the unit of its layer.
        if narrowest is None or values <= fewest:
            narrowest = place
            fewest = values
    return narrowest


def _reasons_uncut(steps: _Steps, begin: int, end: int) -> str:
    """Explain why a unit of several steps with work is not cut; empty for a single step or manual cuts.

    The unit has the steps from ``begin`` to ``end``, exclusive.
    """
    for place in range(begin + 1, end):
        work_before = steps.work[place - 1]
        is_between = steps.work[begin] <= work_before < steps.work[end - 1]
        if not is_between:
            continue
        where = source_line(steps.nodes[place], steps.maker)
        reason = _reason_against_cut(steps, begin, place)
        if reason:
            return f"{where}: no unit can begin here: {reason}"
        if _is_within_module(steps, place):
            return f"{where}: several tensors cross here, inside a module that is kept whole: name it in `units`"
    return ""


def _crossing_values(steps: _Steps, cut: int) -> int:
    """Return the number of values crossing a cut for one sample."""
    values = 0
    for node in steps.crossing(cut):
        values += math.prod(steps.shape(node))
    return values


def _reason_against_cut(steps: _Steps, begin: int, cut: int) -> str | None:
    """Explain why the unit beginning at step ``begin`` cannot end at a cut; None if the cut is possible."""
    crossing = steps.crossing(cut)
    unit = steps.nodes[begin:cut]
    made = [node for node in crossing if node in unit]
    # A unit is a module with one result.
    if len(made) != 1:
        return f"the unit before it computes {len(made)} tensors that are read later, and a unit can have one output"
    if not all(steps.can_cross(node) for node in crossing):
        return "the tensor that crosses there must be float32 with the samples along its first axis"
    # A copy in each unit would see its own calls alone, and neither would have the statistics of both.
    before = set[str]().union(*steps.statistics[:cut])
    after = set[str]().union(*steps.statistics[cut:])
    if before & after:
        return "a normalisation with running statistics is used on both sides of it, and each unit has its own"
    return None


def _is_within_module(steps: _Steps, cut: int) -> bool:
    """Return whether a cut crossed by several tensors is inside a module to be kept whole."""
    if not steps.has_several_tensors(cut):
        return False
    before = _calling_modules(steps.nodes[cut - 1])
    after = _calling_modules(steps.nodes[cut])
    # The modules around both steps are the common beginning of the two paths, so the lengths may differ.
    for path, other in zip(before, after, strict=False):
        module = steps.root.get_submodule(path)
        if path == other and not isinstance(module, _CONTAINERS):
            return True
    return False


def _calling_modules(node: fx.Node) -> list[str]:
    """Return the paths of the modules calling a node, outermost first, without the node's own."""
    # Both tracers note each module as its path and its class.
    stack = node.meta.get("nn_module_stack") or {}
    paths: list[str] = [path for path, _ in stack.values()]
    if node.op != "call_module":
        return paths
    return [path for path in paths if path != node.target]


def _module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the modules a node belongs to, outermost first, the node's own last."""
    paths = _calling_modules(node)
    if node.op == "call_module":
        paths.append(str(node.target))
    return paths


def _cuts_before(steps: _Steps, units: Sequence[str]) -> list[int]:
    """Return the cuts before the named modules; the first unit begins with the network.

    Raises `InputError` for a module that the network does not call, and for one at which no unit can begin.
    """
    key = (KEY[0], "units")
    cuts: list[int] = []
    for name in units:
        first = _first_place(steps, name)
        if first is None:
            known = _called_modules(steps)
            text = f"the network calls no module '{name}': name one of {known}, or a module containing one"
            raise InputError(text, key)
        if first == 0:
            # The unit that begins with the network needs no cut.
            continue
        begin = cuts[-1] if cuts else 0
        if first <= begin:
            raise InputError(
                f"'{name}' must come after the previously named modules", key
            )
        reason = _reason_against_cut(steps, begin, first)
        if reason:
            where = source_line(steps.nodes[first], steps.maker)
            raise InputError(f"{where}: no unit can begin at '{name}': {reason}", key)
        cuts.append(first)
    return cuts


def _first_place(steps: _Steps, name: str) -> int | None:
    """Return the place of the first node within a module; None if the network does not call the module."""
    for place, node in enumerate(steps.nodes):
        for path in _module_paths(node):
            if path == name or path.startswith(f"{name}."):
                return place
    return None


def _called_modules(steps: _Steps) -> str:
    """List the modules called by the network, for an error."""
    # A dictionary, which keeps the order of the calls and drops repeated ones.
    paths = {}
    for node in steps.nodes:
        if node.op == "call_module":
            paths[str(node.target)] = True
    return ", ".join(paths)


# Units


@dataclass(frozen=True)
class TracedUnits:
    """Builds the units of a traced network, each as a separate module."""

    maker: Maker
    graphs: tuple[fx.Graph, ...] = field(compare=False)
    constants: Mapping[str, torch.Tensor] = field(compare=False)

    def network(self, seed: int) -> nn.Module:
        """Build the whole network by the user's function, from the seed."""
        return seeded_network(self.maker, seed)

    def __call__(self, first: int, last: int, seed: int) -> list[nn.Module]:
        """Build units ``first`` to ``last`` (exclusive): the user's function builds all, and the others are dropped.

        All weights are drawn, because the user's function draws them one after the other from one generator.
        """
        root = self.network(seed)
        own_names = root.state_dict().keys()
        # Graphs refer to these tensors as attributes of the network.
        for name, value in self.constants.items():
            setattr(root, name, value)
        units: list[nn.Module] = []
        for graph in self.graphs[first:last]:
            unit = fx.GraphModule(root, graph)
            _hide_constants(unit, own_names)
            units.append(unit)
        return units


def _hide_constants(unit: nn.Module, own_names: Collection[str]) -> None:
    """Exclude buffers from a unit's state, except the buffers of the user's network, ``own_names``.

    torch.fx makes a buffer of each tensor that a graph reads; only buffers of the network belong to its state.
    """
    for name, _ in unit.named_buffers():
        if name in own_names:
            continue
        owner, _, buffer = name.rpartition(".")
        module = unit.get_submodule(owner)
        module._non_persistent_buffers_set.add(buffer)


def _make_chain(
    maker: Maker,
    steps: _Steps,
    named_pieces: Mapping[str, Sequence[fx.Node]],
    input_spec: InputSpec,
    classes: int,
) -> Model:
    """Return the model whose units are the named rows of steps; raises `InputError` for an impossible chain."""
    pieces = list(named_pieces.values())
    # The unit that makes each value, by node.
    makers = {steps.input: INPUT}
    units = []
    graphs = []
    for index, (name, piece) in enumerate(named_pieces.items()):
        read = steps.read_by(piece)
        result = _unit_result(steps, piece, pieces[index + 1 :])
        makers[result] = index
        sources = tuple(makers[node] for node in read)
        # `Unit.reads` is empty for the usual case, a unit that reads the unit before it.
        reads = sources if sources != (index - 1,) else ()
        shapes = [steps.shape(node) for node in read]
        # Inputs of a traced unit may have any shapes: they arrive as all values along one axis.
        arriving = joined_shape(shapes, flatten=True)
        counted = _measure_unit(steps, piece, result, read)
        unit = Unit(name, (counted,), arriving, reads, flattens_inputs=True)
        units.append(unit)
        graphs.append(_unit_graph(steps, piece, read, result))
    _, _, file_name = usercode.file_of(maker.code.module).rpartition("/")
    try:
        return Model(
            name=file_name.removesuffix(".py"),
            input=input_spec.shape,
            classes=classes,
            units=tuple(units),
            integers=input_spec.integers,
            fields=input_spec.fields,
            builder=TracedUnits(maker, tuple(graphs), steps.traced.constants),
            tied_weights=_tied_weights(steps, pieces),
        )
    except ValueError as error:
        raise InputError(str(error), KEY) from None


def _unit_result(
    steps: _Steps, piece: Sequence[fx.Node], later: Sequence[Sequence[fx.Node]]
) -> fx.Node:
    """Return the one node of a unit read by later units; in the last unit, the last node.

    The node need not be the unit's last: steps whose result nobody reads may follow.
    """
    read: set[fx.Node] = set()
    for other in later:
        read.update(steps.read_by(other))
    for node in piece:
        if node in read:
            return node
    return piece[-1]


def _measure_unit(
    steps: _Steps,
    piece: Sequence[fx.Node],
    result: fx.Node,
    read: Sequence[fx.Node],
) -> CountedUnit:
    """Return the sizes and the cost of a unit for one sample, and the layers of a unit made of known layers."""
    trained = 0
    matrices = 0
    frozen = 0
    for parameter in _used_parameters(steps.root, steps.with_local_nodes(piece)):
        if not parameter.requires_grad:
            frozen += parameter.numel()
            continue
        trained += parameter.numel()
        if parameter.ndim > 1:
            matrices += parameter.numel()
    cost = Cost()
    values = 0
    min_samples = 1
    for node in piece:
        measure = steps.runs[0][node.name]
        cost += measure.cost
        values += measure.created_values
        min_samples = max(min_samples, measure.min_samples)
    # Measured for a batch: all but the weights is proportional to the number of samples.
    samples, _ = BATCHES
    per_sample = 1 / samples
    begin = steps.nodes.index(piece[0])
    return CountedUnit(
        shape=steps.shape(result),
        trained=trained,
        matrices=matrices,
        kept=values // samples,
        charged=cost.scaled(flops=per_sample, accessed=per_sample, weights=1),
        undivided_reason=_reasons_uncut(steps, begin, begin + len(piece)),
        least=min_samples,
        described=_describe_unit(steps, piece, result, read, trained),
        untrained=frozen,
    )


def _describe_unit(
    steps: _Steps,
    piece: Sequence[fx.Node],
    result: fx.Node,
    read: Sequence[fx.Node],
    trained: int,
) -> Described:
    """Return the layers of a unit in a row; empty for other units."""
    # In a row, each step makes one tensor for the next, and the last one makes the result.
    if result is not piece[-1]:
        return ()
    for node in piece:
        small, _ = steps.values(node)
        if not isinstance(small, torch.Tensor):
            return ()
    return describe_layers(steps.root, piece, read, steps.shape, trained)


def _unit_name(piece: Sequence[fx.Node], steps: _Steps) -> str:
    """Return the innermost module around all work of a unit, or the module in which the work begins."""
    small, _ = steps.runs
    working = [node for node in piece if small[node.name].has_work]
    if not working:
        working = list(piece)
    paths_of_nodes = [_module_paths(node) for node in working]
    common = []
    for paths in zip(*paths_of_nodes, strict=False):
        if len(set(paths)) == 1:
            common.append(paths[0])
    # Operations of the network's own `forward` are in no module: they have the name of torch.fx.
    innermost = common or paths_of_nodes[0] or [working[0].name]
    return innermost[-1]


def _unit_graph(
    steps: _Steps,
    piece: Sequence[fx.Node],
    read: Sequence[fx.Node],
    result: fx.Node,
) -> fx.Graph:
    """Return a graph of a unit's steps and local nodes, with a placeholder for each value of ``read``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(read):
        copies[node] = graph.placeholder(f"read{place}")
    # The number of samples is read from the first input, whatever it is: all have a row for each sample.
    first = copies[read[0]]
    samples, _ = steps.values(steps.input)
    if samples.dtype != torch.float32 and steps.input in copies:
        # Samples of integers cross a cut as float32.
        converted = graph.call_method("to", (copies[steps.input], samples.dtype))
        copies[steps.input] = converted

    def copied(node: fx.Node) -> Any:
        if node not in copies:
            # Attributes and numbers that follow the unit's mode, training or evaluation, are read in the unit.
            if node.op == "get_attr" or node.target is by_mode:
                copies[node] = graph.node_copy(node, copied)
            else:
                values = steps.values(node)
                copies[node] = _copy_size(steps, node, values, first, graph)
        return copies[node]

    for node in steps.with_local_nodes(piece):
        small, _ = steps.values(node)
        # Sizes are copied where a node uses them.
        if not is_plain(small):
            copies[node] = graph.node_copy(node, copied)
    graph.output(copies[result])
    return graph


def _copy_size(
    steps: _Steps,
    node: fx.Node,
    values: tuple[Any, Any],
    first: fx.Node,
    graph: fx.Graph,
) -> Any:
    """Return a size unchanged, or as a multiple of the number of samples in ``first``, the unit's first input.

    ``values`` are the size for both batches. Raises `InputError` for any other dependence on the number of samples.
    """
    small, large = values
    if isinstance(small, tuple | list) and len(small) == len(large):
        sizes = []
        for pair in zip(small, large, strict=True):
            sizes.append(_copy_size(steps, node, pair, first, graph))
        return tuple(sizes)
    if small == large:
        return small
    # Two batch sizes tell a multiple of the number of samples from any other function of it, such as a sum.
    small_batch, large_batch = BATCHES
    factor = small // small_batch if isinstance(small, int) else 0
    if small != factor * small_batch or large != factor * large_batch:
        where = source_line(node, steps.maker)
        raise InputError(
            f"{where}: depends on the number of samples in an unsupported way", KEY
        )
    samples = graph.call_method("size", (first, 0))
    if factor == 1:
        return samples
    return graph.call_function(operator.mul, (samples, factor))
