"""Messages between the coordinator, which serves the requests, and the devices that hold layers.

An assignment is a range of layers that a device (a stage) holds. A step computes some tokens of a request on all stages
one after the other. Without numerics, padding replaces the tensors of a message.

Names of fields are sent with every message and count as bytes. Therefore some are shorter than the names in the
programs: a range of layers is ``first`` and ``last``, where ``last`` is the layer after the last one; ``way`` is the
path of a step, and ``values`` are activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from testbed.messaging.typed_messages import TypedMessage


@dataclass(frozen=True)
class Assign(TypedMessage, kind="assign"):
    """From the coordinator: load one more range of layers."""

    assignment: int
    """Number of the assignment; no two assignments of a run have the same number."""
    first: int
    """First layer."""
    last: int
    """The layer after the last one."""
    final: bool
    """Whether the range includes the output matrix, so that its device chooses tokens."""
    replica: str | None = None
    """The device that receives copies of new entries of the KV caches."""
    oldest: int | None = None
    """Lowest number of a valid assignment, if all layers are assigned anew: the device drops its older assignments."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The weights of the layers; empty: they are drawn from the seed, or were placed before the run."""


@dataclass(frozen=True)
class Assigned(TypedMessage, kind="assigned"):
    """To the coordinator: the layers are loaded."""

    assignment: int
    """Number of the assignment."""
    held: Mapping[str, int] = field(default_factory=dict)
    """By request, the number of tokens in the KV caches: the tokens of which the device had copies."""


@dataclass(frozen=True)
class Step(TypedMessage, kind="step"):
    """To a stage: compute the next tokens of a request, and send the result to the next stage of the path."""

    assignment: int
    """Number of the receiving stage's assignment."""
    request: int
    """Number of the request."""
    attempt: int
    """Rises when the coordinator sends tokens of a request again; results of lower attempts are ignored."""
    position: int
    """Number of tokens of the request before this step, all of which are in the KV caches."""
    tokens: int
    """Number of tokens of this step."""
    way: Sequence[tuple[str, int]]
    """The stages after this one, each as (device, assignment); the last stage sends its result to the coordinator."""
    values: torch.Tensor | None = None
    """Activations of shape (tokens, width); None without numerics."""
    scored: int = 1
    """Number of tokens at the end of the step after each of which a token is chosen; several if drafts are verified."""


@dataclass(frozen=True)
class Result(
    TypedMessage, kind="result", key=("request", "attempt", "computed", "assignment")
):
    """To the coordinator: the result of the last stage for a step."""

    request: int
    attempt: int
    computed: int
    """Number of tokens of the request after the step, including those of the step."""
    assignment: int
    """Number of the sending stage's assignment."""
    chosen: Sequence[int] = ()
    """The token after each of the last ``scored`` tokens of the step, from the stage with the output matrix."""
    values: torch.Tensor | None = None
    """Activations of shape (tokens, width), from any other stage; None without numerics."""


@dataclass(frozen=True)
class Release(TypedMessage, kind="release"):
    """From the coordinator: drop the KV caches of a complete request."""

    request: int


@dataclass(frozen=True)
class Copy(TypedMessage, kind="copy"):
    """To the next stage, which would replace the sender: the new entries of the sender's KV caches after a step."""

    first: int
    """First layer of the stage."""
    request: int
    attempt: int
    position: int
    """Number of tokens of the request before the step."""
    tokens: int
    """Number of tokens of the step."""
    keys: torch.Tensor | None = None
    """Keys of shape (layers, heads, tokens, values of a head); None without numerics."""
    values: torch.Tensor | None = None
    """Values (of the attention) with the shape of the keys; None without numerics."""


@dataclass(frozen=True)
class Ping(TypedMessage, kind="ping"):
    """From the coordinator: a health check."""

    question: int
    """Number of the round of pings; the answer has the same number."""


@dataclass(frozen=True)
class Pong(TypedMessage, kind="pong"):
    """The answer to a ping."""

    question: int
    incarnation: float
    """Start of the device's program, in seconds; it rises with a restart, which loses all layers."""


@dataclass(frozen=True)
class Forward(TypedMessage, kind="forward"):
    """From the coordinator to all devices with a part of each layer: compute the next tokens of a request."""

    number: int
    """Number of the forward pass, the same on all devices."""
    request: int
    position: int
    """Number of tokens of the request before this pass, all of which are in the KV caches."""
    tokens: int
    """Number of tokens of this pass."""
    values: torch.Tensor | None = None
    """Activations of shape (tokens, width); None without numerics."""


KINDS: tuple[type[TypedMessage], ...] = (
    Assign,
    Assigned,
    Step,
    Result,
    Release,
    Copy,
    Ping,
    Pong,
)
"""Messages of methods whose stages hold whole layers.

Methods that divide each layer use `Forward`; their modules define further messages.
"""
