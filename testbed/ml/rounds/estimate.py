"""Phases 1 and 2 of PipeLearn's optimisation (Zhang et al., III-C): the stage graph, and the time of an epoch.

A device forwards N mini-batches one after the other and uploads the output of its last layer; the server forwards and
backwards the rest, and the device does its backwards after all its forwards. Stages of one kind run in the order of the
mini-batches: one upload at a time, one download at a time. N = 1 is an iteration of split (federated) learning.

The times equal those charged by the testbed: `DeviceSpec.seconds`, bytes on the wire over the link's rate, the link's
delay. The paper gives a mini-batch 1/N of the time of a batch of B; here it has floor(B/N) samples and their time, and
what is left of a batch belongs to the next one. An epoch takes the time of all its samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.data.batches import steps_per_epoch
from testbed.ml.layers import costs
from testbed.ml.models.chain import Model, Unit, backward_of, forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.training.config import TrainingConfig
from testbed.ml.transfer import AS_IT_IS, RoundsPart, share
from testbed.network.link import Link
from testbed.wire.message import size_around

BYTES_PER_LABEL = 8
AGGREGATION_FLOPS = 2.0
"""FLOPs that an average is charged for each parameter of each model in it: a multiply and an add."""


def mini_batch(batch_size: int, parallel: int) -> int:
    """Return B' = floor(B/N), equation (2); raises ValueError for more mini-batches than samples."""
    if not 1 <= parallel <= batch_size:
        raise ValueError(
            f"a batch of {batch_size} cannot be cut into {parallel} mini-batches: take 1 to {batch_size}"
        )
    return batch_size // parallel


def iterations(
    samples: int, batch_size: int, parallel: int, drop_last: bool = True
) -> int:
    """Return the iterations of an epoch, floor(|D| / B'N), at least one: Algorithm 1, line 3."""
    return steps_per_epoch(
        samples, mini_batch(batch_size, parallel) * parallel, drop_last
    )


@dataclass(frozen=True)
class Choice:
    """P and N of one device."""

    split: int
    """P: the layers 1..P are the device's, all others the server's."""
    parallel: int = 1
    """N: the mini-batches of an iteration."""


@dataclass(frozen=True)
class LayerTimes:
    """Profiled times of a layer on one machine, in seconds; forward and backward for one sample."""

    forward: float
    backward: float
    update: float
    forward_weights: float = 0.0
    """Seconds of a mini-batch of any size, beside its samples: reading the weights."""
    backward_weights: float = 0.0
    """Seconds of a mini-batch of any size for reading the weights and writing their gradients."""


@dataclass(frozen=True)
class PairProfile:
    """The profile of Phase 1 for one device and the server; layers q = 1..Q in their order."""

    device: tuple[LayerTimes, ...]
    server: tuple[LayerTimes, ...]
    volumes: tuple[int, ...]
    """Bytes of one sample that leave layer q, forward; the gradient that comes back is as large."""
    states: tuple[int, ...]
    """Bytes of the weights of layer q."""
    up: Link
    """From the device to the server."""
    down: Link
    transfer: RoundsPart = AS_IT_IS
    """Encoding of messages."""

    @property
    def depth(self) -> int:
        """Q."""
        return len(self.device)

    def durations(self, split: int, samples: int) -> dict[Kind, float]:
        """Return t(r) of each kind of stage for a mini-batch of this many samples: equations (5) to (10)."""
        mine, theirs = self.device[:split], self.server[split:]
        activation = samples * (
            self.volumes[split - 1] * share(self.transfer.activations) + BYTES_PER_LABEL
        )
        gradient = samples * self.volumes[split - 1] * share(self.transfer.gradients)
        return {
            "forward": _forward_seconds(mine, samples),  # (5)
            "server forward": _forward_seconds(theirs, samples),  # (6)
            "backward": _backward_seconds(mine, samples),  # (7)
            "server backward": _backward_seconds(theirs, samples),  # (8)
            "upload": self.up.transmission_time(
                size_around(activation)
            ),  # (9), with the labels
            "download": self.down.transmission_time(size_around(gradient)),  # (10)
        }

    def iteration(self, choice: Choice, batch_size: int) -> float:
        """Return the seconds of one iteration: T(b_N) and the device's update. The server's update overlaps."""
        durations = self.durations(
            choice.split, mini_batch(batch_size, choice.parallel)
        )
        delays: dict[Kind, float] = {
            "upload": self.up.delay,
            "download": self.down.delay,
        }
        update = sum(layer.update for layer in self.device[: choice.split])
        return iteration_time(durations, choice.parallel, delays) + update

    def training(self, choice: Choice, samples: int, batch_size: int) -> float:
        """Return the seconds that a device with this many samples trains in an epoch, without exchanging models.

        The samples of an incomplete iteration count by their share: no N is quicker because it leaves some out.
        """
        size = mini_batch(batch_size, choice.parallel) * choice.parallel
        return max(1.0, samples / size) * self.iteration(choice, batch_size)

    def local_training(self, samples: int, batch_size: int) -> float:
        """Return the seconds of an epoch of the whole model on the device alone."""
        step = sum(
            batch_size * (layer.forward + layer.backward) + layer.update
            for layer in self.device
        )
        step += sum(
            layer.forward_weights + layer.backward_weights for layer in self.device
        )
        return iterations(samples, batch_size, 1) * step

    def exchange(self, split: int) -> float:
        """Return the seconds the device's layers take to the server and, averaged, back."""
        state = sum(self.states[:split])
        up, down = (
            state * share(self.transfer.updates),
            state * share(self.transfer.weights),
        )
        return transfer(self.up, up) + transfer(self.down, down)


def _forward_seconds(layers: Sequence[LayerTimes], samples: int) -> float:
    return samples * sum(layer.forward for layer in layers) + sum(
        layer.forward_weights for layer in layers
    )


def _backward_seconds(layers: Sequence[LayerTimes], samples: int) -> float:
    return samples * sum(layer.backward for layer in layers) + sum(
        layer.backward_weights for layer in layers
    )


def transfer(link: Link, content: float) -> float:
    """Return the seconds from the first byte sent to the last byte received."""
    return link.transmission_time(size_around(content)) + link.delay


def layer_times(
    model: Model,
    training: TrainingConfig,
    device: DeviceSpec,
    concurrent_clients: float = 1.0,
) -> tuple[LayerTimes, ...]:
    """Return the time of each layer on a device, by formula.

    ``concurrent_clients`` share one of its processors, which is slower for each by this factor.
    """

    def of(unit: Unit) -> LayerTimes:
        forward, backward = forward_of(unit.cost, 1), backward_of(unit.cost, 1)
        works = [
            each.scaled(flops=1, accessed=1, weights=0) for each in (forward, backward)
        ]
        works.append(costs.update((unit,), training))
        works += [
            each.scaled(flops=0, accessed=0, weights=1) for each in (forward, backward)
        ]
        return LayerTimes(
            *(concurrent_clients * device.seconds(work) for work in works)
        )

    return tuple(of(unit) for unit in model.units)


def profile(
    model: Model,
    device: tuple[LayerTimes, ...],
    server: tuple[LayerTimes, ...],
    up: Link,
    down: Link,
    how: RoundsPart = AS_IT_IS,
    frozen_travels: bool = False,
) -> PairProfile:
    """Return the profile of a device and the server from their `layer_times`."""
    values = [
        unit.parameters + (unit.frozen if frozen_travels else 0) for unit in model.units
    ]
    return PairProfile(
        device=device,
        server=server,
        volumes=tuple(model.cut_bytes(index + 1) for index in range(len(model.units))),
        states=tuple(BYTES_PER_VALUE * count for count in values),
        up=up,
        down=down,
        transfer=how,
    )


def aggregation_time(model: Model, server: DeviceSpec, devices: int) -> float:
    """Return the seconds the server needs to average this many models."""
    return server.seconds(Cost(AGGREGATION_FLOPS * model.parameters * devices))


def epoch(profile: PairProfile, choice: Choice, samples: int, batch_size: int) -> float:
    """Return the seconds of an epoch of one device."""
    return profile.training(choice, samples, batch_size) + profile.exchange(
        choice.split
    )


def shortest_epoch(
    profile: PairProfile, samples: int, batch_size: int, choices: Iterable[Choice]
) -> Choice:
    """Return the first choice with the shortest training epoch, including its exchange of models."""
    return min(choices, key=lambda choice: epoch(profile, choice, samples, batch_size))


Kind = Literal[
    "forward", "upload", "server forward", "server backward", "download", "backward"
]
"""The paper's f^c, u, f^s, b^s, d and b^c."""

GraphStage = tuple[Kind, int]
"""A kind of work, and the mini-batch n = 1..N that it is for."""

KINDS: tuple[Kind, ...] = (
    "forward",
    "upload",
    "server forward",
    "server backward",
    "download",
    "backward",
)

PREVIOUS: Mapping[Kind, tuple[tuple[Kind, int], ...]] = {
    "forward": (("forward", -1),),
    "upload": (("upload", -1), ("forward", 0)),
    "server forward": (("upload", 0), ("server backward", -1)),
    "server backward": (("server forward", 0),),
    "download": (("download", -1), ("server backward", 0)),
    "backward": (("backward", -1), ("download", 0)),
}
"""Table I: what a stage of mini-batch n waits for, as (kind, difference to n). Where that would be mini-batch 0, there
is nothing to wait for, but for the first backward: it waits for the last forward."""


def previous(stage: GraphStage, count: int) -> tuple[GraphStage, ...]:
    """Return the predecessors of a stage in an iteration of ``count`` mini-batches."""
    kind, n = stage
    earlier = ((other, n + shift) for other, shift in PREVIOUS[kind])
    predecessors: tuple[GraphStage, ...] = tuple(
        each for each in earlier if each[1] >= 1
    )
    return (
        (("forward", count), *predecessors)
        if stage == ("backward", 1)
        else predecessors
    )


def stages(count: int) -> Iterator[GraphStage]:
    """Return all stages of an iteration in topological order."""
    for n in range(1, count + 1):
        yield "forward", n
    for n in range(1, count + 1):
        for kind in KINDS[1:-1]:
            yield kind, n
    for n in range(1, count + 1):
        yield "backward", n


def ends(
    durations: Mapping[Kind, float],
    count: int,
    delays: Mapping[Kind, float] | None = None,
) -> dict[GraphStage, float]:
    """Return T(r) of every stage r, the seconds from the iteration's begin to its end: equations (11) to (13).

    Args:
        durations: t(r) in seconds, the same for all mini-batches.
        count: N, at least 1.
        delays: seconds until stages of other kinds learn the end of a stage: a message arrives a link's delay after its
            last byte has left, when the next one is under way. The paper has no delays.
    """
    delays = delays or {}
    end_times: dict[GraphStage, float] = {}
    for stage in stages(count):
        kind, _ = stage
        waits = (
            end_times[before]
            + (delays.get(before[0], 0.0) if before[0] != kind else 0.0)
            for before in previous(stage, count)
        )
        end_times[stage] = durations[kind] + max(waits, default=0.0)
    return end_times


def iteration_time(
    durations: Mapping[Kind, float],
    count: int,
    delays: Mapping[Kind, float] | None = None,
) -> float:
    """Return T(b_N), the seconds of an iteration of ``count`` mini-batches; arguments as of `ends`."""
    return ends(durations, count, delays)["backward", count]
