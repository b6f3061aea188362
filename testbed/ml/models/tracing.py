"""Any `torch.nn.Module` as a chain of units: traced by torch.fx, measured by execution, and cut at narrow places.

A unit begins where torch counts work, so normalisations and activations belong to the layer before them. Cuts are
placed where one tensor crosses. If several tensors cross (a skip, a route), cuts are placed only between modules called
by the network itself or listed in a `Sequential`, so a residual block in a module stays whole.
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
from testbed.ml.models.chain import Model, Tied, Unit, joined
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


def trace_model(
    maker: Maker, entering: InputSpec, classes: int, units: Sequence[str] | None = None
) -> Model:
    """Trace, measure and cut a network; raises `InputError` naming the failing line.

    ``units`` names the modules that begin a unit; None leaves the choice to this module.
    """
    steps = _make_steps(maker, _trace_network(maker, entering, units))
    cuts = _choose_cuts(steps) if units is None else _cuts_before(steps, units)
    bounds = [0, *cuts, len(steps.nodes)]
    pieces = [steps.nodes[begin:end] for begin, end in itertools.pairwise(bounds)]
    names = _unique_names([_unit_name(piece, steps) for piece in pieces])
    if units is not None:
        # The first named module may begin with the network: then it makes no cut.
        names[1:] = units[-len(cuts) :] if cuts else []
    named = dict(zip(names, pieces, strict=True))
    return _make_chain(maker, steps, named, entering, classes)


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return the names with "@1", "@2" ... at those that occur again, such as a module called twice."""
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        earlier = counts[name]
        unique.append(f"{name}@{earlier}" if earlier else name)
        counts[name] += 1
    return unique


def _trace_network(
    maker: Maker, entering: InputSpec, units: Sequence[str] | None
) -> Traced:
    """Trace a network by torch.fx, or by the slower torch.export if torch.fx fails."""
    try:
        return trace_by_fx(maker, entering, units)
    except InputError as error:
        from testbed.ml.models.exported import trace_by_export

        try:
            return trace_by_export(maker, entering)
        except InputError as other:
            raise InputError(f"{error.text}; {other.text}", KEY) from None


@dataclass
class _Steps:
    """The steps of a traced network with their measurements."""

    traced: Traced
    nodes: list[fx.Node]
    """Nodes creating one or more tensors from the inputs."""
    input: fx.Node
    maker: Maker
    work: list[int] = field(default_factory=list)
    """Number of nodes with counted work up to each node, inclusive."""

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
        return self.runs[0][node.name].value, self.runs[1][node.name].value

    def is_local(self, node: fx.Node) -> bool:
        """Whether each unit recomputes a node: its value depends on no sample, is a size, or is a mask."""
        return node is not self.input and node not in self._made

    def __post_init__(self) -> None:
        self._made = {self.input, *self.nodes}
        has_work = [int(self.runs[0][node.name].has_work) for node in self.nodes]
        self.work = list(itertools.accumulate(has_work))
        self.statistics = [
            _with_statistics(self.root, self.all_of([node])) for node in self.nodes
        ]

    def all_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return nodes with the local nodes they need, in order."""
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
        return is_plain(self.values(node)[0])

    def reads(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the values nodes read from other nodes, in order."""
        read: set[fx.Node] = set()
        for node in self.all_of(nodes):
            if not self._is_size(node):
                read.update(node.all_input_nodes)
        outside = read.difference(nodes)
        return [node for node in (self.input, *self.nodes) if node in outside]

    def alive(self, cut: int) -> list[fx.Node]:
        """Return the values computed before a cut and read after the cut."""
        before = {self.input, *self.nodes[:cut]}
        return [node for node in self.reads(self.nodes[cut:]) if node in before]

    def has_several_tensors(self, cut: int) -> bool:
        """Whether several tensors cross a cut, not counting samples crossing for masks only."""
        read: set[fx.Node] = set()
        for node in self.nodes[cut:]:
            read.update(node.all_input_nodes)
        crossing = 0
        for node in self.alive(cut):
            if node is not self.input or node in read:
                crossing += 1
        return crossing > 1

    def can_cross(self, node: fx.Node) -> bool:
        """Whether a node's value can cross a cut: a numeric tensor with a row for each sample."""
        values = self.values(node)
        for value, size in zip(values, BATCHES, strict=True):
            if not isinstance(value, torch.Tensor):
                return False
            # Samples of integers travel as float32, which is exact up to 2^24: beyond the vocabulary of any model.
            if value.dtype != torch.float32 and node is not self.input:
                return False
            if value.ndim < 2 or value.shape[0] != size:
                return False
            if value.shape[1:] != values[0].shape[1:]:
                return False
        return True

    def shape(self, node: fx.Node) -> Shape:
        """Return the shape of a node's value for one sample."""
        return tuple(self.values(node)[0].shape[1:])


def _make_steps(maker: Maker, traced: Traced) -> _Steps:
    by_kind = {node.op: node for node in traced.graph.nodes}
    entering = by_kind["placeholder"]
    dependent = _dependent_nodes(traced, entering)
    computed = dependent - _mask_nodes(traced, entering, dependent) - {entering}
    nodes = [node for node in traced.graph.nodes if node in computed]
    result = by_kind["output"].args[0]
    if not nodes or result is not nodes[-1]:
        where = usercode.file_of(maker.code.module)
        if nodes:
            where = source_line(nodes[-1], maker)
        is_group = isinstance(result, tuple | list | dict)
        given = "several values" if is_group else "what is made of no sample"
        text = f"forward returns {given}: it has to return one tensor, one value for each class"
        raise InputError(f"{where}: {text}", KEY)
    return _Steps(traced, nodes, entering, maker)


def _dependent_nodes(traced: Traced, entering: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors depend on the samples."""
    dependent = {entering}
    for node in traced.graph.nodes:
        is_call = node.op.startswith("call")
        if not is_call or dependent.isdisjoint(node.all_input_nodes):
            continue
        if not is_plain(traced.runs[0][node.name].value):
            dependent.add(node)
    return dependent


def _mask_nodes(
    traced: Traced, entering: fx.Node, dependent: Collection[fx.Node]
) -> set[fx.Node]:
    """Return nodes computed from samples without weights and without gradients: masks, positions, input tokens.

    Each unit recomputes them from the samples.
    """
    masks: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.target is entry:
            # One of several inputs: a slice of the samples' row.
            masks.add(node)
            continue
        read = [each for each in node.all_input_nodes if each in dependent]
        has_only_masks = masks.union([entering]).issuperset(read)
        if read and has_only_masks and _is_mask(traced, node, read):
            masks.add(node)
    return masks


def _is_mask(traced: Traced, node: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Return whether a node computed from samples and masks is a mask as well."""
    if node.op == "output" or traced.runs[0][node.name].has_work:
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
    value = traced.runs[0][node.name].value
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _named_parameters(
    root: nn.Module, nodes: Iterable[fx.Node]
) -> dict[str, nn.Parameter]:
    """Return the parameters used by nodes under all of their names."""
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
    parameters = _named_parameters(root, nodes).values()
    return list({id(each): each for each in parameters}.values())


def _with_statistics(root: nn.Module, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the modules with running statistics called by nodes, by their first path."""
    called: set[int] = set()
    for node in nodes:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            called.update(id(each) for each in module.modules())
    paths = set()
    # `named_modules` gives a module that has several paths once, by the first.
    for path, module in root.named_modules():
        is_normalisation = isinstance(module, nn.modules.batchnorm._NormBase)
        if (
            id(module) in called
            and is_normalisation
            and module.running_mean is not None
        ):
            paths.add(path)
    return paths


def _tied_weights(
    steps: _Steps, pieces: Sequence[Sequence[fx.Node]]
) -> tuple[Tied, ...]:
    """Return the trained weights shared by several units."""
    names: dict[int, list[str]] = {}
    weights: dict[int, nn.Parameter] = {}
    for index, piece in enumerate(pieces):
        for name, weight in _named_parameters(steps.root, steps.all_of(piece)).items():
            names.setdefault(id(weight), []).append(f"{index}.{name}")
            weights[id(weight)] = weight
    shared = []
    for key, weight in weights.items():
        tied = Tied(tuple(names[key]), weight.numel())
        if weight.requires_grad and len(tied.units) > 1:
            shared.append(tied)
    return tuple(shared)


# Cutting


def _choose_cuts(steps: _Steps) -> list[int]:
    """Return the cuts: between two steps with work, the last one with the fewest crossing bytes."""
    cuts: list[int] = []
    begin = 0
    places = range(1, len(steps.nodes))
    for work, group in itertools.groupby(
        places, key=lambda place: steps.work[place - 1]
    ):
        # Before the first work and after the last there is nothing to divide.
        if work in (0, steps.work[-1]):
            continue
        best: int | None = None
        fewest = 0
        for place in group:
            if _why_not(steps, begin, place) or _is_within_module(steps, place):
                continue
            crossing = _crossing_values(steps, place)
            if best is None or crossing <= fewest:
                best = place
                fewest = crossing
        if best is not None:
            begin = best
            cuts.append(best)
    return cuts


def _reasons_uncut(steps: _Steps, begin: int, end: int) -> str:
    """Explain why a unit of several steps with work is not cut; empty for a single step or manual cuts."""
    for place in range(begin + 1, end):
        is_between = steps.work[begin] <= steps.work[place - 1] < steps.work[end - 1]
        if not is_between:
            continue
        where = source_line(steps.nodes[place], steps.maker)
        reason = _why_not(steps, begin, place)
        if reason:
            return f"{where}: no unit can begin here: {reason}"
        if _is_within_module(steps, place):
            return f"{where}: several tensors cross here, inside a module that is kept whole: name it in `units`"
    return ""


def _crossing_values(steps: _Steps, cut: int) -> int:
    return sum(math.prod(steps.shape(node)) for node in steps.alive(cut))


def _why_not(steps: _Steps, begin: int, cut: int) -> str | None:
    """Explain why the unit beginning at one node cannot end before another; None if a cut is possible."""
    alive = steps.alive(cut)
    made = [node for node in alive if node in steps.nodes[begin:cut]]
    if len(made) != 1:
        return f"the unit before it makes {len(made)} tensors that are read later, and one can leave a unit"
    if not all(steps.can_cross(node) for node in alive):
        return "what crosses there is no tensor of float32 values with the samples along its first axis"
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
    for path, other in zip(before, after, strict=False):
        module = steps.root.get_submodule(path)
        if path == other and not isinstance(module, _CONTAINERS):
            return True
    return False


def _calling_modules(node: fx.Node) -> list[str]:
    """Return the paths of the modules calling a node, outermost first, without the node's own."""
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
    """Return the cuts before the named modules; the first unit begins with the network."""
    key = (KEY[0], "units")
    cuts: list[int] = []
    for name in units:
        first = _first_place(steps, name)
        if first is None:
            known = _called_modules(steps)
            text = f"the network calls no module '{name}': name one of {known}, or a module containing one"
            raise InputError(text, key)
        if first == 0:
            continue
        begin = cuts[-1] if cuts else 0
        if first <= begin:
            raise InputError(
                f"'{name}' must come after the previously named modules", key
            )
        reason = _why_not(steps, begin, first)
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
    paths = [str(node.target) for node in steps.nodes if node.op == "call_module"]
    return ", ".join(dict.fromkeys(paths))


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
        """Build some units: the whole network is built by the user's function from the seed, and the rest dropped."""
        root = self.network(seed)
        own_names = root.state_dict().keys()
        for name, value in self.constants.items():
            setattr(root, name, value)
        units: list[nn.Module] = [
            fx.GraphModule(root, graph) for graph in self.graphs[first:last]
        ]
        # torch.fx makes a buffer of each tensor that is read; only those of the network belong to its state.
        for unit in units:
            for name, _ in unit.named_buffers():
                if name not in own_names:
                    owner, _, buffer = name.rpartition(".")
                    module = unit.get_submodule(owner)
                    module._non_persistent_buffers_set.add(buffer)
        return units


def _make_chain(
    maker: Maker,
    steps: _Steps,
    named: Mapping[str, Sequence[fx.Node]],
    entering: InputSpec,
    classes: int,
) -> Model:
    """Return the model whose units are the named rows of nodes; raises `InputError` for an impossible chain."""
    pieces = list(named.values())
    made = {steps.input: INPUT}
    units = []
    graphs = []
    for index, (name, piece) in enumerate(named.items()):
        reads = steps.reads(piece)
        result = _unit_result(steps, piece, pieces[index + 1 :])
        made[result] = index
        sources = tuple(made[node] for node in reads)
        # `Unit.inputs` is empty for the usual case, a unit that reads the unit before it.
        inputs = sources if sources != (index - 1,) else ()
        arriving = joined([steps.shape(node) for node in reads], whole=False)
        counted = _measure_unit(steps, piece, result, reads)
        units.append(Unit(name, (counted,), arriving, inputs, joins=False))
        graphs.append(_unit_graph(steps, piece, reads, result))
    file_name = usercode.file_of(maker.code.module).rpartition("/")[2]
    try:
        return Model(
            file_name.removesuffix(".py"),
            entering.shape,
            classes,
            tuple(units),
            integers=entering.integers,
            fields=entering.fields,
            builder=TracedUnits(maker, tuple(graphs), steps.traced.constants),
            tied=_tied_weights(steps, pieces),
        )
    except ValueError as error:
        raise InputError(str(error), KEY) from None


def _unit_result(
    steps: _Steps, piece: Sequence[fx.Node], later: Sequence[Sequence[fx.Node]]
) -> fx.Node:
    """Return the one node of a unit that later units read: not always the last, which masks may follow."""
    read: set[fx.Node] = set()
    for other in later:
        read.update(steps.reads(other))
    for node in piece:
        if node in read:
            return node
    return piece[-1]


def _measure_unit(
    steps: _Steps,
    piece: Sequence[fx.Node],
    result: fx.Node,
    reads: Sequence[fx.Node],
) -> CountedUnit:
    parameters = _used_parameters(steps.root, steps.all_of(piece))
    trained = [each for each in parameters if each.requires_grad]
    frozen = [each for each in parameters if not each.requires_grad]
    small = [steps.runs[0][node.name] for node in piece]
    cost = sum((measure.cost for measure in small), Cost())
    # Measured for a batch: all but the weights is proportional to the number of samples.
    samples = BATCHES[0]
    begin = steps.nodes.index(piece[0])
    trained_values = sum(each.numel() for each in trained)
    tensors = [steps.values(node)[0] for node in piece]
    layers: Described = ()
    if result is piece[-1] and all(isinstance(each, torch.Tensor) for each in tensors):
        layers = describe_layers(steps.root, piece, reads, steps.shape, trained_values)
    return CountedUnit(
        shape=steps.shape(result),
        trained=trained_values,
        matrices=sum(each.numel() for each in trained if each.ndim > 1),
        kept=sum(measure.made for measure in small) // samples,
        charged=cost.scaled(flops=1 / samples, accessed=1 / samples, weights=1),
        undivided_reason=_reasons_uncut(steps, begin, begin + len(piece)),
        least=max(measure.least for measure in small),
        described=layers,
        untrained=sum(each.numel() for each in frozen),
    )


def _unit_name(piece: Sequence[fx.Node], steps: _Steps) -> str:
    """Return the module of a unit, or the module its work begins in."""
    working = [node for node in piece if steps.runs[0][node.name].has_work]
    if not working:
        working = list(piece)
    ways = [_module_paths(node) for node in working]
    common = [paths[0] for paths in zip(*ways, strict=False) if len(set(paths)) == 1]
    innermost = common or ways[0] or [working[0].name]
    return innermost[-1]


def _unit_graph(
    steps: _Steps, piece: Sequence[fx.Node], reads: Sequence[fx.Node], result: fx.Node
) -> fx.Graph:
    """Return a graph of some nodes, with placeholders for the values they read."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(reads):
        copies[node] = graph.placeholder(f"read{place}")
    first = copies[reads[0]]
    kind = steps.values(steps.input)[0].dtype
    if kind != torch.float32 and steps.input in copies:
        # Samples of integers cross a cut as float32.
        copies[steps.input] = graph.call_method("to", (copies[steps.input], kind))

    def copied(node: fx.Node) -> Any:
        if node not in copies:
            # Attributes and numbers that follow the unit's mode, training or evaluation, are read in the unit.
            if node.op == "get_attr" or node.target is by_mode:
                copies[node] = graph.node_copy(node, copied)
            else:
                copies[node] = _copy_size(steps, node, steps.values(node), first, graph)
        return copies[node]

    for node in steps.all_of(piece):
        if not is_plain(steps.values(node)[0]):
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
        pairs = zip(small, large, strict=True)
        return tuple(_copy_size(steps, node, pair, first, graph) for pair in pairs)
    if small == large:
        return small
    factor, rest = divmod(small, BATCHES[0]) if isinstance(small, int) else (0, 1)
    if rest or large != factor * BATCHES[1]:
        where = source_line(node, steps.maker)
        raise InputError(
            f"{where}: depends on the number of samples in an unsupported way", KEY
        )
    samples = graph.call_method("size", (first, 0))
    if factor == 1:
        return samples
    return graph.call_function(operator.mul, (samples, factor))
