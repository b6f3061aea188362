"""What a network does, step by step: traced by torch.fx and run at the same time, with two sizes of a batch.

So sizes that do not depend on the samples are plain numbers to the user's code, which may branch and loop on them; what
remains unknown is the number of samples and what their values are.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.device import Cost, Kind
from testbed.models.making import KEY, Maker
from testbed.models.shapes import BYTES_PER_VALUE, Shape

BATCHES = (2, 3)
"""Samples with which the network is run: what differs between the two is the batch's."""
_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""What changes its input, and the same as a new value: a unit must leave alone what other units may read."""
_MAKING = (torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn, torch.arange)
"""Functions that make tensors of sizes, the number of samples among them: torch does not show a tracer these."""
_REMEDY = "write it without that, or put it into a module of its own and name that in `units`"


@dataclass(frozen=True)
class Measure:
    """What running a step came to."""

    value: Any
    cost: Cost = field(default_factory=Cost)
    made: int = 0
    """Values of the tensors made within it."""

    @property
    def works(self) -> bool:
        """Whether torch counts FLOPs in it."""
        return self.cost.of().flops > 0


@dataclass(frozen=True)
class Traced:
    """A network and what it does."""

    root: nn.Module
    graph: fx.Graph
    runs: tuple[dict[str, Measure], ...]
    """By node, of each size of a batch."""
    constants: Mapping[str, torch.Tensor]
    """Tensors that `forward` makes of nothing that enters, by the names that the graph reads them by."""


def trace(maker: Maker, shape: Shape, whole: Sequence[str] | None, integers: bool = False) -> Traced:
    """Trace and measure a network; raises `InputError` naming the line that is in the way.

    Samples are of float32, or of int64 where they are ``integers``.

    First without values, so that large networks are described at once; where the user's code does not allow that, with
    random ones, the modules ``whole`` not looked into.
    """
    try:
        return _trace(maker, shape, "meta", (), integers)
    except InputError:
        return _trace(maker, shape, "cpu", tuple(whole or ()), integers)


def seeded(maker: Maker, seed: int) -> nn.Module:
    """Make the network with the weights of a seed; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "weights"))
        return _made(maker)


def plain(value: object) -> bool:
    """Say whether a value is a number, a size or the like: the same for all samples, but for how many there are."""
    if isinstance(value, tuple | list):
        return all(plain(each) for each in value)
    return value is None or isinstance(value, int | float | str | torch.dtype | torch.device | slice)


def line(node: fx.Node, maker: Maker) -> str:
    """Return the user's line that a node comes from."""
    file = usercode.shown(maker.code.module)
    places = [each for each in (node.stack_trace or "").splitlines() if f'File "{file}"' in each]
    return f"{file}:{places[-1].split('line ')[1].split(',')[0]}" if places else file


def _made(maker: Maker) -> nn.Module:
    root = maker()
    for name, module in root.named_modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            text = (
                f"'{name}' has no sizes yet: call the network once, as net(torch.zeros(1, *shape)), and return it then"
            )
            raise InputError(f"{usercode.shown(maker.code.module)}: {text}", KEY)
    return root


def _trace(maker: Maker, shape: Shape, device: str, whole: Sequence[str], integers: bool) -> Traced:
    """Trace in training and in evaluation: where they differ in a True and a False, that follows the unit's mode."""
    tracers = []
    for training in (True, False):
        if device == "meta":
            with torch.device("meta"):
                root = _made(maker)
        else:
            root = seeded(maker, 0)
        root.train(training)
        tracers.append(_Tracer(shape, device, whole, integers))
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                tracers[-1].trace(root)
        except InputError as error:
            raise InputError(f"{usercode.line_of(error, maker.code)}: {error.text}", KEY) from error
        except Exception as error:
            text = f"cannot be traced: {first_line(error)}: {_REMEDY}"
            raise InputError(f"{usercode.line_of(error, maker.code)}: {text}", KEY) from error
    tracer, evaluating = tracers
    _follow_mode(tracer, evaluating.graph, maker)
    for node in reversed(tracer.graph.nodes):
        node.meta.pop("is_wrapped", None)  # else the modules made of it would have torch.fx patch the functions again
        if not node.users and node.op not in ("placeholder", "output"):
            tracer.graph.erase_node(node)
    made = {name: value for value, name in tracer.tensor_attrs.items() if name.startswith("_tensor_constant")}
    constants = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
    return Traced(tracer.root, tracer.graph, tracer.runs, constants)


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _follow_mode(tracer: _Tracer, evaluating: fx.Graph, maker: Maker) -> None:
    """Replace each True that is False in evaluation by the mode of the unit; refuse whatever else differs."""
    graph = tracer.graph
    ours, theirs = list(graph.nodes), list(evaluating.nodes)
    with graph.inserting_before(ours[0]):
        mode = graph.get_attr("training")
    for runs in tracer.runs:
        runs[mode.name] = Measure(True)
    for at, node in enumerate(ours):
        other = theirs[at] if at < len(theirs) else None
        if other is not None and (node.op, str(node.target)) == (other.op, str(other.target)):
            found = _followed((node.args, node.kwargs), (other.args, other.kwargs), mode)
            if found is not None:
                node.args, node.kwargs = found
                continue
        text = "does something else in evaluation than in training: write this as a module of torch.nn that does so"
        raise InputError(f"{line(node, maker)}: {text}", KEY)


def _followed(ours: Any, theirs: Any, mode: fx.Node) -> Any:
    """Return arguments with the mode for what is True in training and False in evaluation; None: they differ."""
    if ours is True and theirs is False:
        return mode
    pairs: list[tuple[Any, Any]] = []
    if isinstance(ours, tuple | list) and isinstance(theirs, tuple | list) and len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
    elif isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(ours[key], theirs[key]) for key in ours]
    if not pairs or repr(ours) == repr(theirs):
        return ours if repr(ours) == repr(theirs) else None
    found = [_followed(*pair, mode) for pair in pairs]
    if any(new is None and old is not None for new, (old, _) in zip(found, pairs, strict=True)):
        return None
    return dict(zip(ours, found, strict=True)) if isinstance(ours, dict) else type(ours)(found)


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations cost: values of new tensors, those read to make them, FLOPs; views cost nothing."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0
        self.cost = Cost()
        self.counter = FlopCounterMode(display=False)
        """To be entered first: it counts what this one lets through."""
        self._weights = {each.untyped_storage()._cdata for each in (*root.parameters(), *root.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counter.get_total_flops()
        found = func(*args, **(kwargs or {}))
        flops = self.counter.get_total_flops() - before
        first = found[0] if isinstance(found, tuple | list) and found else found
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not func.is_view:
            given = pytree.tree_leaves((args, kwargs))
            read = [each for each in given if isinstance(each, torch.Tensor) and each.is_floating_point()]
            weights = [each for each in read if each.untyped_storage()._cdata in self._weights]
            values = first.numel() + sum(each.numel() for each in read) - sum(each.numel() for each in weights)
            matrices = sum(each.numel() for each in weights if each.ndim > 1)
            self.made += first.numel()
            self.cost += Cost(flops, BYTES_PER_VALUE * values, BYTES_PER_VALUE * matrices, _kind(func, args, flops))
        return found


def _kind(operation: Any, arguments: Sequence[Any], flops: float) -> Kind:
    """Return which kind of layer an operation of aten is the work of."""
    name = operation.name()
    if name == "aten::convolution":
        weight, groups = arguments[1], arguments[-1]
        if groups > 1:
            return "depthwise"
        return "pointwise" if math.prod(weight.shape[2:]) == 1 else "convolution"
    if flops:
        return "linear"
    if "norm" in name:
        return "normalisation"
    return "pooling" if "pool" in name or "mean" in name else "activation"


class _Value(fx.Proxy):
    """Something of which the tracer knows what it is for each size of a batch."""

    def __getattr__(self, k: str) -> Any:
        found = getattr(self.tracer.values(self.node)[0], k)  # type: ignore[attr-defined]
        if callable(found):
            return super().__getattr__(k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        sizes = {len(value) for value in self.tracer.values(self.node)}  # type: ignore[attr-defined]
        if len(sizes) > 1:
            raise InputError("the number of samples is not known here: take x.shape[0], not len(x)")
        return int(sizes.pop())

    def __index__(self) -> int:
        raise InputError("the number of samples is not known here: make the network so that it takes any")

    def __setitem__(self, key: object, value: object) -> None:
        raise InputError("changes a tensor in place: make a new one, as torch.where and torch.cat do")


class _Tracer(fx.Tracer):
    """Runs each step as it is traced, and hands its value to the user's code where that is the same for all samples."""

    proxy_buffer_attributes = True

    def __init__(self, shape: Shape, device: str, whole: Sequence[str], integers: bool) -> None:
        super().__init__(autowrap_functions=_MAKING)
        self._autowrap_search.append(torch)
        self.record_stack_traces = True
        self.runs: tuple[dict[str, Measure], ...] = ({}, {})
        self._shape = shape
        self._device = device
        self._integers = integers
        self._whole = [name for name in whole if not any(other.startswith(f"{name}.") for other in whole)]
        self._running = False
        self._draws = torch.Generator().manual_seed(0)

    def values(self, node: fx.Node) -> tuple[Any, Any]:
        """Return what a step made of each of the two batches."""
        return self.runs[0][node.name].value, self.runs[1][node.name].value

    # What torch.fx asks

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> Any:
        """Hand over the samples alone: other arguments are what the user's code has for them."""
        required = [
            each.name
            for each in inspect.signature(root_fn).parameters.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if len(required) > 2:
            names = ", ".join(required[1:])
            raise InputError(f"forward takes {names}: a network here takes one tensor, the samples", KEY)
        return root_fn, [self.root, self.create_proxy("placeholder", "samples", (), {})]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a module is one step."""
        return module_qualified_name in self._whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call, or carry it out while a step is run."""
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return what stands for an attribute, or the attribute while a step is run."""
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for the value of a step."""
        return _Value(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Loop over what has the same length for all batches."""
        return (obj[place] for place in range(len(obj)))  # type: ignore[index]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse what is not known: what is known is no proxy."""
        tensor = isinstance(self.values(obj.node)[0], torch.Tensor)
        raise InputError(f"branches on {'values of a tensor' if tensor else 'the number of samples'}: {_REMEDY}")

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Trace a step; return its value where that is the same for all samples."""
        proxy = super().create_proxy(*args, **kwargs)
        small, large = self.values(proxy.node)
        if isinstance(small, torch.device):
            return torch.device("cpu")  # where units compute
        return small if plain(small) and small == large and type(small) is type(large) else proxy

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        """Write down a step and run it."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise InputError("`with` torch.no_grad or torch.autocast is lost in tracing: use .detach() or .to(...)")
        if kind == "call_method" and target in ("item", "tolist"):
            raise InputError(f".{target}() reads values of a tensor: {_REMEDY}")
        if kind == "call_method" and target.endswith("_") and not target.endswith("__"):
            raise InputError(f".{target}() changes a tensor in place: make a new one")
        target = _IN_PLACE.get(target, target)
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind != "output":
            self._running = True
            try:
                for size, runs in zip(BATCHES, self.runs, strict=True):
                    runs[node.name] = self._measured(node, size, runs)
            except Exception as error:
                raise InputError(first_line(error)) from error
            finally:
                self._running = False
        return node

    def _measured(self, node: fx.Node, size: int, runs: Mapping[str, Measure]) -> Measure:
        if node.op == "placeholder":
            samples = torch.rand(size, *self._shape, generator=self._draws).to(self._device)
            if self._integers:
                samples = samples.long()  # zeros, which every embedding has
            return Measure(samples)
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(self.root)
            return Measure(found.to(self._device) if isinstance(found, torch.Tensor) else found)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: runs[each.name].value)
        work = _Work(self.root)
        with torch.device(self._device), work.counter, work:
            value = self._called(node, args, kwargs)
        return Measure(value, work.cost, work.made)

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
