"""Messages as dataclasses: a family of methods declares one class for each kind that its programs send."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from testbed.wire import arrays
from testbed.wire.message import Message, WireError

Fixed = Annotated[float, "fixed length"]
"""A number that is sent as text of constant length, so that results do not decide how long messages travel."""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """Base of all typed messages. For example::

        @dataclass(frozen=True)
        class Gradient(Typed, kind="gradient", key=("batch", "micro")):
            configuration: int
            batch: int
            micro: int
            tensor: torch.Tensor

    The type of a field decides how it is sent, however its annotation is written. A tensor is sent under the field's
    name. A mapping from names to tensors (``State``) holds all other tensors of the message, under their own names. A
    ``Fixed`` number is sent as text of constant length. Every other field is a JSON value; tuples arrive as lists. A
    field that is None, and is None by default, is left out.
    """

    kind: ClassVar[str] = ""
    """Its name on the wire."""
    key: ClassVar[tuple[str, ...]] = ()
    """The fields that distinguish two messages of a kind, ``sender`` among them if wanted; none: each is another."""
    opens: ClassVar[bool] = False
    """Whether it may be of a newer configuration than its receiver's. Its handler opens that one."""

    sender: str = ""
    """Set on arrival."""
    padding: int = 0
    """Bytes charged beside the content."""
    missing: Mapping[str, Any] = field(default_factory=dict)
    """What is missing, as in `testbed.wire.message.Message`."""

    def __init_subclass__(cls, kind: str = "", key: tuple[str, ...] = (), opens: bool = False) -> None:
        super().__init_subclass__()
        cls.kind, cls.key, cls.opens = kind or cls.kind, key or cls.key, opens or cls.opens

    @property
    def identity(self) -> Hashable:
        """The value of the key, a tuple of values where it has several fields; None where there is no key."""
        if len(self.key) == 1:
            return getattr(self, self.key[0])  # type: ignore[no-any-return]
        return tuple(getattr(self, name) for name in self.key) or None


@dataclass(frozen=True)
class Numbered(Typed):
    """Base of messages that count in one configuration only; see `testbed.messaging.mailbox.Mailbox`."""

    configuration: int


K = TypeVar("K", bound=Typed)


@dataclass(frozen=True)
class _Form:
    values: tuple[tuple[str, bool], ...]
    """JSON fields, and whether None is left out."""
    tensors: tuple[str, ...]
    fixed: tuple[str, ...]
    """Those of the JSON fields that take a fixed length."""
    state: str | None


class _Tensor:
    """Stands for `torch.Tensor` where annotations are resolved, which must not import torch."""


class _Torch:
    """The name ``torch`` in annotations that are text."""

    Tensor = _Tensor

    def __getattr__(self, name: str) -> Any:
        return Any


@cache
def _form(kind: type[Typed]) -> _Form:
    """Classify the fields of a message by their types; raises TypeError for an annotation that names nothing."""
    try:
        hints = get_type_hints(kind, localns={"torch": _Torch()}, include_extras=True)
    except NameError as error:
        raise TypeError(f"{kind.__qualname__}: the annotation of a field cannot be resolved: {error}") from None
    values: list[tuple[str, bool]] = []
    tensors: list[str] = []
    fixed: list[str] = []
    state = None
    for each in fields(kind):
        if each.name in ("sender", "padding", "missing"):
            continue
        hint = _without_none(hints[each.name])
        if _is_tensor(hint):
            tensors.append(each.name)
        elif _is_state(hint):
            state = each.name
        else:
            values.append((each.name, each.default is None))
            if hint == Fixed:
                fixed.append(each.name)
    return _Form(tuple(values), tuple(tensors), tuple(fixed), state)


def _without_none(hint: Any) -> Any:
    """Return T for ``T | None``, and any other type as it is."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    others = [each for each in get_args(hint) if each is not NoneType]
    return others[0] if len(others) == 1 else hint


def _is_tensor(hint: Any) -> bool:
    return hint is _Tensor or arrays.is_array_type(get_origin(hint) or hint)


def _is_state(hint: Any) -> bool:
    """Return whether a type is a mapping from names to tensors."""
    origin, arguments = get_origin(hint), get_args(hint)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return is_mapping and len(arguments) == 2 and arguments[0] is str and _is_tensor(arguments[1])


def encode(message: Typed) -> Message:
    """Return a typed message as it travels."""
    form = _form(type(message))  # type: ignore[arg-type]  # the hash of a class, not of its instances
    said = ((name, getattr(message, name), optional) for name, optional in form.values)
    values = {name: value for name, value, optional in said if value is not None or not optional}
    values |= {name: f"{values[name]:+24.16e}" for name in form.fixed if values.get(name) is not None}
    given = {name: getattr(message, name) for name in form.tensors}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if form.state is not None:
        tensors.update(getattr(message, form.state))
    return Message(message.kind, values, tensors, message.sender, message.padding)


def decode(kind: type[K], message: Message) -> K:
    """Return a message that arrived, as its kind; raises `WireError` where its fields are not those of the kind."""
    form = _form(kind)  # type: ignore[arg-type]
    given: dict[str, Any] = {**message.fields}
    for name in form.tensors:
        if name in message.tensors:
            given[name] = message.tensors[name]
    if form.state is not None:
        given[form.state] = {name: value for name, value in message.tensors.items() if name not in form.tensors}
    try:
        if form.fixed:
            given |= {name: float(given[name]) for name in form.fixed if given.get(name) is not None}
        return kind(**given, sender=message.sender, padding=message.padding, missing=message.missing)
    except (TypeError, ValueError) as error:
        raise WireError(f"message '{message.kind}' of {message.sender}: {error}") from error
