"""Phases 1 and 2 of PipeLearn's optimisation (Zhang et al., III-C): the profile of layers, and the time of an epoch.

In one iteration a device trains a batch of B samples, divided into N mini-batches, together with the server. The device
forwards the mini-batches through its layers one after the other and uploads each output of its last layer. The server
does forward and backward of the remaining layers, and the device does its backwards after all its forwards. Each of
these operations on one mini-batch is a stage r, which takes t(r) seconds and ends at T(r). Stages of one kind run in
the order of the mini-batches: one upload at a time, one download at a time. With N = 1 this is an iteration of split
(federated) learning.

The times equal those charged by the testbed: `DeviceSpec.seconds`, bytes on the wire over the link's rate, the link's
delay. In the paper a mini-batch takes 1/N of the time of a batch; here a mini-batch has floor(B/N) samples and their
time, and the remaining samples of a batch belong to the next batch. An epoch takes the time of all its samples.

The paper's symbols have an index k for the device, which is omitted here because each function concerns one device.
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
from testbed.ml.transfer import UNENCODED, RoundEncodingPart, encoded_share
from testbed.network.link import Link
from testbed.wire.message import size_around

BYTES_PER_LABEL = 8
"""Bytes of a class, which messages carry as int64."""
AGGREGATION_FLOPS = 2.0
"""FLOPs that an average is charged for each parameter of each model in it: a multiply and an add."""


def mini_batch(batch_size: int, parallel_batches: int) -> int:
    """Return the number of samples of a mini-batch, B' = floor(B/N), equation (2).

    Raises ValueError for more mini-batches than samples.

    >>> mini_batch(batch_size=32, parallel_batches=3)
    10
    """
    if not 1 <= parallel_batches <= batch_size:
        raise ValueError(
            f"a batch of {batch_size} samples has 1 to {batch_size} mini-batches, not {parallel_batches}"
        )
    return batch_size // parallel_batches


def iterations(
    samples: int,
    batch_size: int,
    parallel_batches: int,
    *,
    drop_last: bool = True,
) -> int:
    """Return the number of iterations of an epoch, floor(|D| / B'N), at least one: Algorithm 1, line 3.

    ``samples`` is |D|, the number of the device's samples. Without ``drop_last`` the remaining samples form one more
    iteration.

    >>> iterations(samples=100, batch_size=32, parallel_batches=3)
    3
    """
    size = mini_batch(batch_size, parallel_batches) * parallel_batches
    return steps_per_epoch(samples, size, drop_last=drop_last)


@dataclass(frozen=True)
class Choice:
    """The parameters optimised for a device: P and N."""

    split_point: int
    """P: the device trains layers 1 to P, the server all later layers."""
    parallel_batches: int = 1
    """N: number of mini-batches of an iteration."""


@dataclass(frozen=True)
class LayerTimes:
    """Profiled times of a layer on one machine, in seconds.

    A forward of n samples takes n times ``forward`` plus ``forward_weights``, and a backward likewise.
    """

    forward: float
    """Seconds for each sample."""
    backward: float
    """Seconds for each sample."""
    update: float
    """Seconds for an update of the layer's weights."""
    forward_weights: float = 0.0
    """Seconds for reading the weights, once for a mini-batch of any size."""
    backward_weights: float = 0.0
    """Seconds for reading the weights and writing their gradients, once for a mini-batch of any size."""


@dataclass(frozen=True)
class PairProfile:
    """The profile of Phase 1 for one device and the server; each tuple has an entry for each layer q = 1 to Q."""

    device: tuple[LayerTimes, ...]
    """Times of the layers on the device."""
    server: tuple[LayerTimes, ...]
    """Times of the layers on the server."""
    volumes: tuple[int, ...]
    """Bytes of each layer's output for one sample; the gradient of the output is as large."""
    states: tuple[int, ...]
    """Bytes of each layer's weights."""
    up: Link
    """Link from the device to the server."""
    down: Link
    """Link from the server to the device."""
    transfer: RoundEncodingPart = UNENCODED
    """Encoding of messages."""

    @property
    def depth(self) -> int:
        """Q, the number of layers."""
        return len(self.device)

    def durations(self, split: int, samples: int) -> dict[Kind, float]:
        """Return t(r) of each kind of stage, in seconds, for a mini-batch of ``samples`` samples.

        ``split`` is P, the number of layers on the device. Equations (5) to (10).
        """
        own_layers = self.device[:split]
        server_layers = self.server[split:]
        volume = self.volumes[split - 1]
        # Equation (9) has the activations only; here messages also contain the labels.
        activation_share = encoded_share(self.transfer.activations)
        per_sample = volume * activation_share + BYTES_PER_LABEL
        activation = size_around(samples * per_sample)
        gradient_share = encoded_share(self.transfer.gradients)
        gradient = size_around(samples * volume * gradient_share)
        # In the order of equations (5) to (10).
        return {
            "forward": _forward_seconds(own_layers, samples),
            "server forward": _forward_seconds(server_layers, samples),
            "backward": _backward_seconds(own_layers, samples),
            "server backward": _backward_seconds(server_layers, samples),
            "upload": self.up.transmission_time(activation),
            "download": self.down.transmission_time(gradient),
        }

    def iteration_time(self, choice: Choice, batch_size: int) -> float:
        """Return the seconds of one iteration: T(b_N), the end of the device's last backward, and the device's update.

        The server's update takes no further time, since the device still does its backwards then.
        """
        mini_batches = choice.parallel_batches
        samples = mini_batch(batch_size, mini_batches)
        durations = self.durations(choice.split_point, samples)
        delays: dict[Kind, float] = {
            "upload": self.up.delay,
            "download": self.down.delay,
        }
        own_layers = self.device[: choice.split_point]
        update = sum(layer.update for layer in own_layers)
        return iteration_time(durations, mini_batches, delays) + update

    def training_time(self, choice: Choice, samples: int, batch_size: int) -> float:
        """Return the seconds of a device's training in an epoch of ``samples`` samples, without exchanging models.

        An incomplete iteration counts by its share of the samples. Without it, an N that leaves out more samples would
        seem to be faster.
        """
        mini_batches = choice.parallel_batches
        iteration_samples = mini_batch(batch_size, mini_batches) * mini_batches
        iterations_per_epoch = max(1.0, samples / iteration_samples)
        return iterations_per_epoch * self.iteration_time(choice, batch_size)

    def local_training_time(self, samples: int, batch_size: int) -> float:
        """Return the seconds of an epoch if the device trains the whole model alone."""
        step = sum(
            batch_size * (layer.forward + layer.backward) + layer.update
            for layer in self.device
        )
        # Reading and writing weights takes the same time for a batch of any size.
        step += sum(
            layer.forward_weights + layer.backward_weights for layer in self.device
        )
        return iterations(samples, batch_size, parallel_batches=1) * step

    def exchange_time(self, split: int) -> float:
        """Return the seconds in which the first ``split`` layers travel to the server and, averaged, back."""
        state = sum(self.states[:split])
        uploaded = state * encoded_share(self.transfer.updates)
        downloaded = state * encoded_share(self.transfer.weights)
        up = transfer_time(self.up, uploaded)
        down = transfer_time(self.down, downloaded)
        return up + down


def _forward_seconds(layers: Sequence[LayerTimes], samples: int) -> float:
    """Return the seconds of a forward of ``samples`` samples through some layers."""
    per_sample = sum(layer.forward for layer in layers)
    weights = sum(layer.forward_weights for layer in layers)
    return samples * per_sample + weights


def _backward_seconds(layers: Sequence[LayerTimes], samples: int) -> float:
    """Return the seconds of a backward of ``samples`` samples through some layers."""
    per_sample = sum(layer.backward for layer in layers)
    weights = sum(layer.backward_weights for layer in layers)
    return samples * per_sample + weights


def transfer_time(link: Link, content: float) -> float:
    """Return the seconds from the first sent to the last received byte of a message with ``content`` bytes of tensors.

    >>> transfer_time(Link(rate=8e6, delay=0.01), content=1e6)
    1.056058
    """
    return link.transmission_time(size_around(content)) + link.delay


def layer_times(
    model: Model,
    training: TrainingConfig,
    device: DeviceSpec,
    clients_per_processor: float = 1.0,
) -> tuple[LayerTimes, ...]:
    """Return the times of each layer on a device, from the layer's cost and the device's speed.

    If ``clients_per_processor`` clients share a processor of the device, all times are multiplied by their number.
    """

    def seconds(cost: Cost) -> float:
        return clients_per_processor * device.seconds(cost)

    def times_of(unit: Unit) -> LayerTimes:
        forward = forward_of(unit.cost, 1)
        backward = backward_of(unit.cost, 1)
        update = costs.update_cost((unit,), training)
        # Costs of samples and of weights are separate, since a mini-batch of any size reads the weights once.
        return LayerTimes(
            forward=seconds(_sample_cost(forward)),
            backward=seconds(_sample_cost(backward)),
            update=seconds(update),
            forward_weights=seconds(_weight_cost(forward)),
            backward_weights=seconds(_weight_cost(backward)),
        )

    return tuple(times_of(unit) for unit in model.units)


def _sample_cost(cost: Cost) -> Cost:
    """Return the part of a cost proportional to the number of samples."""
    return cost.scaled(flops=1, accessed=1, weights=0)


def _weight_cost(cost: Cost) -> Cost:
    """Return the part of a cost incurred once by a mini-batch of any size."""
    return cost.scaled(flops=0, accessed=0, weights=1)


def make_profile(
    model: Model,
    device: tuple[LayerTimes, ...],
    server: tuple[LayerTimes, ...],
    up: Link,
    down: Link,
    encoding: RoundEncodingPart = UNENCODED,
    *,
    frozen_travels: bool = False,
) -> PairProfile:
    """Return the profile of a device and the server.

    ``device`` and ``server`` are the results of `layer_times`. With ``frozen_travels`` the exchanged models include
    frozen weights.
    """
    volumes = []
    states = []
    for index, unit in enumerate(model.units):
        volumes.append(model.cut_bytes(index + 1))
        values = unit.parameters
        if frozen_travels:
            values += unit.frozen_parameters
        states.append(BYTES_PER_VALUE * values)
    return PairProfile(
        device=device,
        server=server,
        volumes=tuple(volumes),
        states=tuple(states),
        up=up,
        down=down,
        transfer=encoding,
    )


def aggregation_time(model: Model, server: DeviceSpec, devices: int) -> float:
    """Return the seconds in which the server averages the models of ``devices`` devices."""
    flops = AGGREGATION_FLOPS * model.parameters * devices
    return server.seconds(Cost(flops))


def epoch_time(
    profile: PairProfile, choice: Choice, samples: int, batch_size: int
) -> float:
    """Return the seconds of an epoch of one device: training, and the exchange of models with the server."""
    training = profile.training_time(choice, samples, batch_size)
    return training + profile.exchange_time(choice.split_point)


def shortest_epoch(
    profile: PairProfile, samples: int, batch_size: int, choices: Iterable[Choice]
) -> Choice:
    """Return the choice with the shortest `epoch_time`; of equally short ones the first."""

    def seconds(choice: Choice) -> float:
        return epoch_time(profile, choice, samples, batch_size)

    return min(choices, key=seconds)


Kind = Literal[
    "forward", "upload", "server forward", "server backward", "download", "backward"
]
"""Kinds of stages: the paper's f^c, u, f^s, b^s, d and b^c."""

GraphStage = tuple[Kind, int]
"""The kind of a stage, and the number n = 1 to N of its mini-batch."""

KINDS: tuple[Kind, ...] = (
    "forward",
    "upload",
    "server forward",
    "server backward",
    "download",
    "backward",
)
"""Kinds of stages in the order in which a mini-batch passes through them."""

PREDECESSORS: Mapping[Kind, tuple[tuple[Kind, int], ...]] = {
    "forward": (("forward", -1),),
    "upload": (("upload", -1), ("forward", 0)),
    "server forward": (("upload", 0), ("server backward", -1)),
    "server backward": (("server forward", 0),),
    "download": (("download", -1), ("server backward", 0)),
    "backward": (("backward", -1), ("download", 0)),
}
"""Table I: the predecessors of a stage of mini-batch n, as pairs of a kind and a difference to n.

`predecessors` omits stages of mini-batch 0, which does not exist, and adds one rule of the table: the backward of the
first mini-batch waits for the forward of the last one.
"""


def predecessors(stage: GraphStage, count: int) -> tuple[GraphStage, ...]:
    """Return the predecessors of a stage in an iteration of ``count`` mini-batches.

    >>> predecessors(("upload", 2), count=3)
    (('upload', 1), ('forward', 2))
    """
    kind, n = stage
    earlier_stages: list[GraphStage] = []
    if stage == ("backward", 1):
        earlier_stages.append(("forward", count))
    for earlier_kind, difference in PREDECESSORS[kind]:
        earlier_n = n + difference
        if earlier_n >= 1:
            earlier_stages.append((earlier_kind, earlier_n))
    return tuple(earlier_stages)


def graph_stages(count: int) -> Iterator[GraphStage]:
    """Return all stages of an iteration in topological order.

    >>> list(graph_stages(count=1))
    [('forward', 1), ('upload', 1), ('server forward', 1), ('server backward', 1), ('download', 1), ('backward', 1)]
    """
    for n in range(1, count + 1):
        yield "forward", n
    for n in range(1, count + 1):
        # From its upload to its download, a mini-batch waits for no later mini-batch.
        for kind in KINDS[1:-1]:
            yield kind, n
    for n in range(1, count + 1):
        yield "backward", n


def end_times(
    durations: Mapping[Kind, float],
    count: int,
    delays: Mapping[Kind, float] | None = None,
) -> dict[GraphStage, float]:
    """Return T(r) of every stage r: the seconds from the beginning of the iteration to the end of r.

    Equations (11) to (13): a stage starts when all its predecessors have ended, and then takes t(r).

    Args:
        durations: t(r) of each kind in seconds, equal for all mini-batches.
        count: N, at least 1.
        delays: delay of the link, in seconds, by the kinds "upload" and "download". A message arrives by this delay
            after its last byte has left, while the next message may leave already. The paper has no delays.
    """
    delays = delays or {}
    ends: dict[GraphStage, float] = {}
    for stage in graph_stages(count):
        kind, _ = stage
        start = 0.0
        for predecessor in predecessors(stage, count):
            predecessor_kind, _ = predecessor
            end = ends[predecessor]
            # The next message of a link starts as soon as the link is free; stages that need the message wait for its
            # arrival.
            if predecessor_kind != kind:
                end += delays.get(predecessor_kind, 0.0)
            start = max(start, end)
        ends[stage] = durations[kind] + start
    return ends


def iteration_time(
    durations: Mapping[Kind, float],
    count: int,
    delays: Mapping[Kind, float] | None = None,
) -> float:
    """Return T(b_N), the seconds of an iteration of ``count`` mini-batches, for the arguments of `end_times`.

    >>> iteration_time(dict.fromkeys(KINDS, 1.0), count=2)
    8.0
    """
    ends = end_times(durations, count, delays)
    return ends["backward", count]
