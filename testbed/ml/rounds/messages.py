"""Messages between the server and the devices of training in rounds.

The server sends `Begin` to the participants of a round; a device answers with `Begun`, trains, and sends `Update`. With
a split model, device and server exchange `DeviceActivation` and `ActivationGradient` in each iteration, and `Norms` if
gradients are clipped by norm. If a round is repeated, each attempt has a configuration number of its own, by which the
mailbox drops messages of earlier attempts.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.messaging.membership import Hello
from testbed.messaging.typed_messages import ConfigurationMessage, Fixed, TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.lazy import torch

_EXTRA = "extra:"
"""Prefix of the names of additional tensors, which distinguishes them from weights."""


def with_extra(weights: State, extra: State) -> dict[str, torch.Tensor]:
    """Join weights and additional tensors of a method, which may have the same names, for one message.

    >>> sorted(with_extra({"0.weight": torch.ones(1)}, {"momentum": torch.zeros(1)}))
    ['0.weight', 'extra:momentum']
    """
    joined = dict(weights)
    for name, tensor in extra.items():
        joined[_EXTRA + name] = tensor
    return joined


def split_extra(
    state: State,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights and the additional tensors joined by `with_extra`.

    >>> split_extra(with_extra({"0.weight": torch.ones(1)}, {"momentum": torch.zeros(1)}))
    ({'0.weight': tensor([1.])}, {'momentum': tensor([0.])})
    """
    weights = {}
    extra = {}
    for name, tensor in state.items():
        if name.startswith(_EXTRA):
            extra[name.removeprefix(_EXTRA)] = tensor
        else:
            weights[name] = tensor
    return weights, extra


@dataclass(frozen=True)
class Ping(TypedMessage, kind="ping"):
    """From the server to a late device: answer as soon as the device is idle."""


@dataclass(frozen=True)
class Here(TypedMessage, kind="here"):
    """To the server: the answer to a ping, from a device ready for the next round."""


@dataclass(frozen=True)
class Begin(ConfigurationMessage, kind="begin", opens=True):
    """From the server: train a round from these weights."""

    round: int
    """Number of the round, from 0."""
    state: State
    """Weights and running statistics of the device's layers, and the tensors of the method's `Hooks.extra`."""


@dataclass(frozen=True)
class Begun(ConfigurationMessage, kind="begun"):
    """To the server: the round's training begins here."""

    incarnation: float
    """Start of the sender's program, in seconds, which a restart changes."""
    first: int
    """The round's first iteration; iterations are counted through all rounds."""
    last: int
    """The iteration after the round's last one."""


@dataclass(frozen=True)
class DeviceActivation(
    ConfigurationMessage, kind="activation", key=("sender", "iteration", "micro")
):
    """To the server: the output of the device's last layer."""

    iteration: int
    """Number of the iteration, counted through all rounds."""
    micro: int
    """Number of the mini-batch in the iteration, from 0."""
    samples: int
    """Number of samples of the whole iteration."""
    tensor: torch.Tensor
    """(samples of the mini-batch, ...)"""
    labels: torch.Tensor
    """(samples of the mini-batch,)"""
    whole: float | None = None
    """`TrainingConfig.weight` of all labels of the iteration; None if it equals ``samples``."""


@dataclass(frozen=True)
class ActivationGradient(
    ConfigurationMessage, kind="gradient", key=("iteration", "micro")
):
    """From the server: the gradient of an activation, with the shape of the activation."""

    iteration: int
    micro: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Norms(ConfigurationMessage, kind="norms", key=("sender", "iteration")):
    """For clipping by norm: to the server, gradient norms of a device's layers; back, the norms of all layers."""

    iteration: int
    tensor: torch.Tensor
    """(trained tensors,), in the order of the model."""


@dataclass(frozen=True)
class Update(ConfigurationMessage, kind="update", key=("sender",)):
    """To the server, at the end of a device's round: the trained layers (PipeLearn's signal "stop epoch")."""

    samples: int
    """Number of samples in the round's training."""
    loss: Fixed | None
    """Mean loss of these samples; None if the server has computed the loss."""
    state: State
    """Weights of the device's layers, or their changes, and the tensors of `LocalRound.sends`."""


KINDS: tuple[type[TypedMessage], ...] = (
    Hello,
    Ping,
    Here,
    Begin,
    Begun,
    DeviceActivation,
    ActivationGradient,
    Norms,
    Update,
)
"""All messages that the mailbox of a server or a device has to register."""
