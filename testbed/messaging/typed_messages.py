"""Messages as dataclasses: a method declares one class for each kind of message."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from testbed.wire import arrays
from testbed.wire.message import Message, WireError

Fixed = Annotated[float, "fixed length"]
"""A number encoded as text of constant length, so that transfer times do not depend on results."""


@dataclass(frozen=True, kw_only=True)
class TypedMessage:
    """Base class of all typed messages. For example::

        @dataclass(frozen=True)
        class Gradient(TypedMessage, kind="gradient", key=("batch", "micro")):
            configuration: int
            batch: int
            micro: int
            tensor: torch.Tensor

    >>> @dataclass(frozen=True)
    ... class Vote(TypedMessage, kind="vote", key=("round",)):
    ...     round: int
    ...     loss: Fixed
    >>> Vote(3, 0.25).identity
    3

    The type of a field determines its encoding, with or without postponed annotations. A tensor is sent under the
    field's name. A mapping from names to tensors (``State``) holds all other tensors of the message, under their own
    names. A ``Fixed`` number is sent as text of constant length. Every other field is a JSON value; tuples arrive as
    lists. A field that is None by default is omitted if its value is None.
    """

    kind: ClassVar[str] = ""
    """Name of the message kind on the wire."""
    key: ClassVar[tuple[str, ...]] = ()
    """Fields that identify a message of its kind, possibly ``sender``; without a key, all messages are distinct."""
    opens: ClassVar[bool] = False
    """Whether a message of a newer configuration than its receiver's is accepted; its handler opens the newer one."""

    sender: str = ""
    """Sending device; the receiving runtime sets the field."""
    padding: int = 0
    """Bytes charged in addition to the content."""
    missing: Mapping[str, Any] = field(default_factory=dict)
    """Masks of lost values, as in `testbed.wire.message.Message`."""

    def __init_subclass__(
        cls, kind: str = "", key: tuple[str, ...] = (), opens: bool = False
    ) -> None:
        super().__init_subclass__()
        cls.kind = kind or cls.kind
        cls.key = key or cls.key
        cls.opens = opens or cls.opens

    @property
    def identity(self) -> Hashable:
        """The value of the key: a tuple if the key has several fields, None without a key."""
        if len(self.key) == 1:
            return getattr(self, self.key[0])  # type: ignore[no-any-return]
        return tuple(getattr(self, name) for name in self.key) or None


@dataclass(frozen=True)
class ConfigurationMessage(TypedMessage):
    """Base class of messages valid in one configuration; see `testbed.messaging.mailbox.Mailbox`."""

    configuration: int


K = TypeVar("K", bound=TypedMessage)


@dataclass(frozen=True)
class _FieldGroups:
    """The names of the fields of one kind of message, grouped by their encoding."""

    values: tuple[tuple[str, bool], ...]
    """JSON fields, each with whether a None is omitted."""
    tensors: tuple[str, ...]
    """Fields with one tensor each."""
    fixed: tuple[str, ...]
    """The JSON fields of constant length."""
    state: str | None
    """The field with a mapping of all other tensors; None without one."""


class _Tensor:
    """A stand-in for `torch.Tensor` while annotations are resolved, which must not import torch."""


class _Torch:
    """A stand-in for the module ``torch`` in annotations written as text."""

    Tensor = _Tensor

    def __getattr__(self, name: str) -> Any:
        return Any


@cache
def _classify_fields(kind: type[TypedMessage]) -> _FieldGroups:
    """Classify the fields of a message by type; raises TypeError for an unresolvable annotation."""
    try:
        hints = get_type_hints(kind, localns={"torch": _Torch()}, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{kind.__qualname__}: cannot resolve the annotation of a field: {error}"
        ) from None
    values: list[tuple[str, bool]] = []
    tensors: list[str] = []
    fixed: list[str] = []
    state = None
    for item in fields(kind):
        # These fields belong to every message, not to the content of its kind.
        if item.name in ("sender", "padding", "missing"):
            continue
        hint = _without_none(hints[item.name])
        if _is_tensor(hint):
            tensors.append(item.name)
        elif _is_state(hint):
            state = item.name
        else:
            values.append((item.name, item.default is None))
            if hint == Fixed:
                fixed.append(item.name)
    return _FieldGroups(tuple(values), tuple(tensors), tuple(fixed), state)


def _without_none(hint: Any) -> Any:
    """Return T for ``T | None``, and any other type unchanged."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    members = [argument for argument in get_args(hint) if argument is not NoneType]
    return members[0] if len(members) == 1 else hint


def _is_tensor(hint: Any) -> bool:
    return hint is _Tensor or arrays.is_array_type(get_origin(hint) or hint)


def _is_state(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return (
        is_mapping
        and len(arguments) == 2
        and arguments[0] is str
        and _is_tensor(arguments[1])
    )


def encode(message: TypedMessage) -> Message:
    """Return a typed message as an untyped one, ready to send.

    >>> encode(ConfigurationMessage(7)).fields
    {'configuration': 7}
    """
    groups = _classify_fields(type(message))  # type: ignore[arg-type]  # the hash of a class, not of its instances
    values = {}
    for name, optional in groups.values:
        value = getattr(message, name)
        if value is not None or not optional:
            values[name] = value
    for name in groups.fixed:
        if values.get(name) is not None:
            # Sign, 17 significant digits and exponent: float() restores the exact value.
            values[name] = f"{values[name]:+24.16e}"
    tensors = {}
    for name in groups.tensors:
        tensor = getattr(message, name)
        if tensor is not None:
            tensors[name] = tensor
    # Only one field may hold a mapping: its tensors have no prefix on the wire.
    if groups.state is not None:
        tensors.update(getattr(message, groups.state))
    return Message(message.kind, values, tensors, message.sender, message.padding)


def decode(kind: type[K], message: Message) -> K:
    """Return a received message as an instance of the message's class.

    Raises `WireError` if its fields are not those of the kind.
    """
    groups = _classify_fields(kind)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {**message.fields}
    for name in groups.tensors:
        if name in message.tensors:
            arguments[name] = message.tensors[name]
    if groups.state is not None:
        state = {}
        # In the order of the message: the order of keys decides the order of sums.
        for name, value in message.tensors.items():
            if name not in groups.tensors:
                state[name] = value
        arguments[groups.state] = state
    try:
        for name in groups.fixed:
            if arguments.get(name) is not None:
                arguments[name] = float(arguments[name])
        return kind(
            **arguments,
            sender=message.sender,
            padding=message.padding,
            missing=message.missing,
        )
    except (TypeError, ValueError) as error:
        raise WireError(
            f"message '{message.kind}' of {message.sender}: {error}"
        ) from error
