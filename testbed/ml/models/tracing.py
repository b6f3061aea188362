"""Any `torch.nn.Module` as a chain of units: traced by torch.fx, measured by execution, and cut at narrow places.

A unit begins where torch counts work, so normalisations and activations belong to the layer before them. Cuts are
placed where one tensor crosses. If several tensors cross (a skip, a route), cuts are placed only between modules called
by the network itself or listed in a `Sequential`, so a residual block in a module stays whole.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.ml.fields import InputSpec, entry
from testbed.ml.models.chain import Model, Tied, Unit, joined
from testbed.ml.models.described import described
from testbed.ml.models.making import KEY, CountedUnit, Maker
from testbed.ml.models.shapes import INPUT, Shape
from testbed.ml.models.tracer import (
    BATCHES,
    STACKS,
    Measure,
    Traced,
    by_mode,
    line,
    plain,
    seeded,
    trace,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *STACKS)


def traced(
    maker: Maker, entering: InputSpec, classes: int, units: Sequence[str] | None = None
) -> Model:
    """Trace, measure and cut a network; raises `InputError` naming the failing line."""
    steps = _make_steps(maker, _trace_network(maker, entering, units))
    cuts = _choose_cuts(steps) if units is None else _by_hand(steps, units)
    pieces = [
        steps.nodes[begin:end]
        for begin, end in itertools.pairwise([0, *cuts, len(steps.nodes)])
    ]
    given = [_unit_name(piece, steps) for piece in pieces]
    names = [
        f"{name}@{count}" if (count := given[:at].count(name)) else name
        for at, name in enumerate(given)
    ]
    if units is not None:
        names[1:] = units[-len(cuts) :] if cuts else []
    return _make_chain(
        maker, steps, dict(zip(names, pieces, strict=True)), entering, classes
    )


def _trace_network(
    maker: Maker, entering: InputSpec, units: Sequence[str] | None
) -> Traced:
    """Trace a network by torch.fx, or by the slower torch.export if torch.fx fails."""
    try:
        return trace(maker, entering, units)
    except InputError as error:
        from testbed.ml.models.exported import exported

        try:
            return exported(maker, entering)
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

    def local(self, node: fx.Node) -> bool:
        """Whether each unit recomputes a node: its value depends on no sample, is a size, or is a mask."""
        return node is not self.input and node not in self._made

    def __post_init__(self) -> None:
        self._made = {self.input, *self.nodes}
        self.work = list(
            itertools.accumulate(
                int(self.runs[0][node.name].works) for node in self.nodes
            )
        )
        self.statistics = [
            _with_statistics(self.root, self.all_of([node])) for node in self.nodes
        ]

    def all_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return nodes with the local nodes they need, in order."""
        wanted: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in wanted:
                wanted.add(node)
                if not plain(self.values(node)[0]):
                    waiting += [
                        each for each in node.all_input_nodes if self.local(each)
                    ]
        return [node for node in self.traced.graph.nodes if node in wanted]

    def reads(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the values nodes read from other nodes, in order."""
        inside = set(nodes)
        read = {
            each
            for node in self.all_of(nodes)
            if not plain(self.values(node)[0])
            for each in node.all_input_nodes
        }
        return [
            node
            for node in (self.input, *self.nodes)
            if node in read and node not in inside
        ]

    def alive(self, cut: int) -> list[fx.Node]:
        """Return the values computed before a cut and read after the cut."""
        before = {self.input, *self.nodes[:cut]}
        return [node for node in self.reads(self.nodes[cut:]) if node in before]

    def mixed(self, cut: int) -> bool:
        """Whether several tensors cross a cut, not counting samples crossing for masks only."""
        read = {each for node in self.nodes[cut:] for each in node.all_input_nodes}
        return (
            sum(node is not self.input or node in read for node in self.alive(cut)) > 1
        )

    def travels(self, node: fx.Node) -> bool:
        """Whether a node's value can cross a cut: a numeric tensor with a row for each sample."""
        values = self.values(node)
        return all(
            isinstance(value, torch.Tensor)
            and (value.dtype == torch.float32 or node is self.input)
            and value.ndim > 1
            and value.shape[0] == size
            and value.shape[1:] == values[0].shape[1:]
            for value, size in zip(values, BATCHES, strict=True)
        )

    def shape(self, node: fx.Node) -> Shape:
        """Return the shape of a node's value for one sample."""
        return tuple(self.values(node)[0].shape[1:])


def _make_steps(maker: Maker, traced: Traced) -> _Steps:
    entering, output = (
        next(node for node in traced.graph.nodes if node.op == kind)
        for kind in ("placeholder", "output")
    )
    depends = _dependent_nodes(traced, entering)
    masks = _mask_nodes(traced, entering, depends)
    nodes = [
        node for node in traced.graph.nodes if node in depends - masks - {entering}
    ]
    result = output.args[0]
    if not nodes or result is not nodes[-1]:
        where = line(nodes[-1], maker) if nodes else usercode.file_of(maker.code.module)
        given = (
            "several values"
            if isinstance(result, tuple | list | dict)
            else "what is made of no sample"
        )
        text = f"forward returns {given}: it has to return one tensor, one value for each class"
        raise InputError(f"{where}: {text}", KEY)
    return _Steps(traced, nodes, entering, maker)


def _dependent_nodes(traced: Traced, entering: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors depend on the samples."""
    dependent = {entering}
    for node in traced.graph.nodes:
        called = node.op.startswith("call") and not dependent.isdisjoint(
            node.all_input_nodes
        )
        if called and not plain(traced.runs[0][node.name].value):
            dependent.add(node)
    return dependent


def _mask_nodes(
    traced: Traced, entering: fx.Node, depends: Collection[fx.Node]
) -> set[fx.Node]:
    """Return nodes computed from samples without weights and without gradients: masks, positions, input tokens.

    Each unit recomputes them from the samples.
    """
    masks: set[fx.Node] = set()
    for node in traced.graph.nodes:
        read = [each for each in node.all_input_nodes if each in depends]
        one_input = node.target is entry
        if one_input or (
            read
            and masks.union([entering]).issuperset(read)
            and _is_mask(traced, node, read)
        ):
            masks.add(node)
    return masks


def _is_mask(traced: Traced, node: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Return whether a node computed from samples and masks is a mask as well."""
    if node.op == "output" or traced.runs[0][node.name].works:
        return False
    if _used_parameters(traced.root, [node, *node.all_input_nodes]):
        return False
    entered = [
        each for each in read if each.op == "placeholder" or each.target is entry
    ]
    return not _is_float(traced, node) or not any(
        _is_float(traced, each) for each in entered
    )


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
            parameters |= root.get_submodule(path).named_parameters(
                path, remove_duplicate=False
            )
        elif node.op == "get_attr":
            value = operator.attrgetter(path)(root)
            if isinstance(value, nn.Parameter):
                parameters[path] = value
    return parameters


def _used_parameters(root: nn.Module, nodes: Iterable[fx.Node]) -> list[nn.Parameter]:
    """Return the parameters used by nodes, each once."""
    return list(
        {id(each): each for each in _named_parameters(root, nodes).values()}.values()
    )


def _with_statistics(root: nn.Module, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the modules with running statistics called by nodes, by their first path."""
    called = {
        id(root.get_submodule(str(node.target)))
        for node in nodes
        if node.op == "call_module"
    }
    inside = {
        id(each)
        for path, each in root.named_modules()
        if id(each) in called
        for each in each.modules()
    }
    return {
        path
        for path, each in root.named_modules()
        if id(each) in inside
        and isinstance(each, nn.modules.batchnorm._NormBase)
        and each.running_mean is not None
    }


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
    candidates = (
        Tied(tuple(names[key]), weight.numel())
        for key, weight in weights.items()
        if weight.requires_grad
    )
    return tuple(each for each in candidates if len(each.units) > 1)


# Cutting


def _choose_cuts(steps: _Steps) -> list[int]:
    """Return the cuts: between two steps with work, the last one with the fewest crossing bytes."""
    cuts: list[int] = []
    begin = 0
    places = range(1, len(steps.nodes))
    for work, group in itertools.groupby(
        places, key=lambda place: steps.work[place - 1]
    ):
        if work in (0, steps.work[-1]):
            continue
        fitting = [
            place
            for place in group
            if _why_not(steps, begin, place) is None
            and not _is_within_module(steps, place)
        ]
        if fitting:
            begin = min(
                reversed(fitting), key=lambda place: _crossing_bytes(steps, place)
            )
            cuts.append(begin)
    return cuts


def _reasons_uncut(steps: _Steps, begin: int, end: int) -> str:
    """Explain why a unit of several steps with work is not cut; empty for a single step or manual cuts."""
    for place in range(begin + 1, end):
        if not steps.work[begin] <= steps.work[place - 1] < steps.work[end - 1]:
            continue
        where = line(steps.nodes[place], steps.maker)
        if why := _why_not(steps, begin, place):
            return f"{where}: no unit can begin here: {why}"
        if _is_within_module(steps, place):
            return f"{where}: several tensors cross here, inside a module that is kept whole: name it in `units`"
    return ""


def _crossing_bytes(steps: _Steps, cut: int) -> int:
    return sum(math.prod(steps.shape(node)) for node in steps.alive(cut))


def _why_not(steps: _Steps, begin: int, cut: int) -> str | None:
    """Explain why the unit beginning at one node cannot end before another; None if a cut is possible."""
    alive = steps.alive(cut)
    made = [node for node in alive if node in steps.nodes[begin:cut]]
    if len(made) != 1:
        return f"the unit before it makes {len(made)} tensors that are read later, and one can leave a unit"
    if not all(steps.travels(node) for node in alive):
        return "what crosses there is no tensor of float32 values with the samples along its first axis"
    before, after = (
        set[str]().union(*steps.statistics[part])
        for part in (slice(cut), slice(cut, None))
    )
    if before & after:
        return "a normalisation with running statistics is used on both sides of it, and each unit has its own"
    return None


def _is_within_module(steps: _Steps, cut: int) -> bool:
    """Return whether a cut crossed by several tensors is inside a module to be kept whole."""
    if not steps.mixed(cut):
        return False
    before, after = (_calling_modules(steps.nodes[place]) for place in (cut - 1, cut))
    common = [path for path, other in zip(before, after, strict=False) if path == other]
    return any(
        not isinstance(steps.root.get_submodule(path), _CONTAINERS) for path in common
    )


def _calling_modules(node: fx.Node) -> list[str]:
    """Return the paths of the modules calling a node, outermost first, without the node's own."""
    stack: list[str] = [
        path for path, _ in (node.meta.get("nn_module_stack") or {}).values()
    ]
    return [
        path for path in stack if not (node.op == "call_module" and path == node.target)
    ]


def _by_hand(steps: _Steps, units: Sequence[str]) -> list[int]:
    """Return the cuts before the named modules; the first unit begins with the network."""
    key = (KEY[0], "units")
    cuts: list[int] = []
    for name in units:
        inside = [place for place, node in enumerate(steps.nodes) if _is_in(node, name)]
        if not inside:
            known = ", ".join(
                dict.fromkeys(
                    str(node.target) for node in steps.nodes if node.op == "call_module"
                )
            )
            raise InputError(
                f"the network calls no module '{name}': name one of {known}, or a module containing one",
                key,
            )
        if inside[0] == 0:
            continue
        begin = cuts[-1] if cuts else 0
        if inside[0] <= begin:
            raise InputError(
                f"'{name}' must come after the previously named modules", key
            )
        if why := _why_not(steps, begin, inside[0]):
            raise InputError(
                f"{line(steps.nodes[inside[0]], steps.maker)}: no unit can begin at '{name}': {why}",
                key,
            )
        cuts.append(inside[0])
    return cuts


def _is_in(node: fx.Node, name: str) -> bool:
    paths = [
        *_calling_modules(node),
        str(node.target) if node.op == "call_module" else "",
    ]
    return any(path == name or path.startswith(f"{name}.") for path in paths)


# Units


@dataclass(frozen=True)
class TracedUnits:
    """Builds the units of a traced network, each as a separate module."""

    maker: Maker
    graphs: tuple[fx.Graph, ...] = field(compare=False)
    constants: Mapping[str, torch.Tensor] = field(compare=False)

    def network(self, seed: int) -> nn.Module:
        """Build the whole network by the user's function, from the seed."""
        return seeded(self.maker, seed)

    def __call__(self, first: int, last: int, seed: int) -> list[nn.Module]:
        """Build some units: the whole network is built by the user's function from the seed, and the rest dropped."""
        root = self.network(seed)
        kept = root.state_dict().keys()
        for name, value in self.constants.items():
            setattr(root, name, value)
        units: list[nn.Module] = [
            fx.GraphModule(root, graph) for graph in self.graphs[first:last]
        ]
        for unit in units:  # fx makes a buffer of each tensor that is read: only those of the network are its state
            for name, _ in unit.named_buffers():
                owner, _, own = name.rpartition(".")
                if name not in kept:
                    unit.get_submodule(owner)._non_persistent_buffers_set.add(own)
        return units


def _make_chain(
    maker: Maker,
    steps: _Steps,
    named: Mapping[str, Sequence[fx.Node]],
    entering: InputSpec,
    classes: int,
) -> Model:
    pieces = list(named.values())
    made = {steps.input: INPUT}
    units = []
    graphs = []
    for index, (name, piece) in enumerate(named.items()):
        reads = steps.reads(piece)
        later = {node for other in pieces[index + 1 :] for node in steps.reads(other)}
        result = next((node for node in piece if node in later), piece[-1])
        made[result] = index
        places = tuple(made[node] for node in reads)
        arriving = joined([steps.shape(node) for node in reads], whole=False)
        one = places if places != (index - 1,) else ()
        begin = steps.nodes.index(piece[0])
        counted = replace(
            _measure_units(steps, piece, result),
            held=_reasons_uncut(steps, begin, begin + len(piece)),
        )
        if result is piece[-1] and all(
            isinstance(steps.values(node)[0], torch.Tensor) for node in piece
        ):
            layers = described(steps.root, piece, reads, steps.shape, counted.trained)
            counted = replace(counted, described=layers)
        units.append(Unit(name, (counted,), arriving, one, joins=False))
        graphs.append(_unit_graph(steps, piece, reads, result))
    try:
        file = usercode.file_of(maker.code.module).rpartition("/")[2]
        builder = TracedUnits(maker, tuple(graphs), steps.traced.constants)
        name, whole, fields = (
            file.removesuffix(".py"),
            entering.integers,
            entering.fields,
        )
        return Model(
            name,
            entering.shape,
            classes,
            tuple(units),
            integers=whole,
            fields=fields,
            builder=builder,
            tied=_tied_weights(steps, pieces),
        )
    except ValueError as error:
        raise InputError(str(error), KEY) from None


def _measure_units(
    steps: _Steps, piece: Sequence[fx.Node], result: fx.Node
) -> CountedUnit:
    everything = _used_parameters(steps.root, steps.all_of(piece))
    parameters = [each for each in everything if each.requires_grad]
    small = steps.runs[0]
    cost = sum((small[node.name].cost for node in piece), Cost())
    return CountedUnit(
        shape=steps.shape(result),
        trained=sum(each.numel() for each in parameters),
        matrices=sum(each.numel() for each in parameters if each.ndim > 1),
        kept=sum(small[node.name].made for node in piece) // BATCHES[0],
        charged=cost.scaled(flops=1 / BATCHES[0], accessed=1 / BATCHES[0], weights=1),
        least=max(small[node.name].least for node in piece),
        untrained=sum(each.numel() for each in everything if not each.requires_grad),
    )


def _unit_name(piece: Sequence[fx.Node], steps: _Steps) -> str:
    """Return the module of a unit, or the module its work begins in."""
    working = [node for node in piece if steps.runs[0][node.name].works] or list(piece)
    ways = [
        [
            *_calling_modules(node),
            *([str(node.target)] if node.op == "call_module" else []),
        ]
        for node in working
    ]
    common = [paths[0] for paths in zip(*ways, strict=False) if len(set(paths)) == 1]
    return str((common or ways[0] or [working[0].name])[-1])


def _unit_graph(
    steps: _Steps, piece: Sequence[fx.Node], reads: Sequence[fx.Node], result: fx.Node
) -> fx.Graph:
    """Return a graph of some nodes, with placeholders for the values they read."""
    graph = fx.Graph()
    copies = {
        node: graph.placeholder(f"read{place}") for place, node in enumerate(reads)
    }
    first = copies[reads[0]]
    if (
        kind := steps.values(steps.input)[0].dtype
    ) != torch.float32 and steps.input in copies:
        copies[steps.input] = graph.call_method(
            "to", (copies[steps.input], kind)
        )  # across a cut it goes as float32

    def sized(values: tuple[Any, Any], node: fx.Node) -> Any:
        """Return a size unchanged, or as a multiple of the number of input samples."""
        small, large = values
        if isinstance(small, tuple | list) and len(small) == len(large):
            return tuple(sized(pair, node) for pair in zip(small, large, strict=True))
        if small == large:
            return small
        factor, rest = divmod(small, BATCHES[0]) if isinstance(small, int) else (0, 1)
        if rest or large != factor * BATCHES[1]:
            raise InputError(
                f"{line(node, steps.maker)}: depends on the number of samples in an unsupported way",
                KEY,
            )
        samples = graph.call_method("size", (first, 0))
        return (
            samples
            if factor == 1
            else graph.call_function(operator.mul, (samples, factor))
        )

    def copied(node: fx.Node) -> Any:
        if node not in copies:
            local = (
                node.op == "get_attr" or node.target is by_mode
            )  # the mode of the unit, training or evaluation
            copies[node] = (
                graph.node_copy(node, copied)
                if local
                else sized(steps.values(node), node)
            )
        return copies[node]

    for node in steps.all_of(piece):
        if not plain(steps.values(node)[0]):
            copies[node] = graph.node_copy(node, copied)
    graph.output(copies[result])
    return graph
