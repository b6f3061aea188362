"""Partitions of a model over devices in a row: planned, checked against device memory, and timed by formula.

Each device is a stage with consecutive units of the model; ``cuts`` are the positions between units at which one stage
ends and the next begins (`testbed.ml.partition.cuts`). Activations pass the stages forward, and in training their
gradients return backward.

`Chain` is the pipeline of inference, `TrainingPipeline` the common part of training, and `SynchronousPipeline` training
with one update a step. `testbed.ml.partition.asynchronous` has training with an update after every batch.

Planners minimise one of two times: the passage of a batch (or micro-batch) through an otherwise empty pipeline, and the
bottleneck, the time for which a batch occupies the busiest stage or link. A full pipeline completes one batch in each
bottleneck time.

The times equal those charged by the testbed: `DeviceSpec.seconds`, bytes on the wire over the link's rate, and
the link's one-way delay. Each direction of a link has its own rate, so activations and gradients do not share it.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.data.batches import cut_batch
from testbed.ml.models.chain import Model, TiedWeight, Unit, backward_of, forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.partition import cuts as cutting
from testbed.ml.partition.cuts import Costs, Cuts
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.schedule import (
    Action,
    Schedule,
    Slot,
    actions_by_stage,
    peak_in_flight,
    simulate_schedule,
)
from testbed.network.link import Link, Pair
from testbed.wire.message import size_around

StageBytes = Callable[[int, int, int], float]
"""(stage, first, stop) -> bytes that units ``first`` to ``stop`` (exclusive) need on the stage."""


def _neighbour_pairs(devices: Sequence[DeviceSpec]) -> list[Pair]:
    """Return the (source, target) names of the links between neighbouring devices, in both directions."""
    pairs: list[Pair] = []
    for device, following in pairwise(devices):
        pairs.append((device.name, following.name))
        pairs.append((following.name, device.name))
    return pairs


@dataclass(frozen=True)
class Chain:
    """The units of a model over devices in a row, one stage each, with the costs of a batch.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> devices = (DeviceSpec("a", speed=1e9, memory=1e9), DeviceSpec("b", speed=1e9, memory=1e9))
    >>> links = {("a", "b"): Link(rate=8e6), ("b", "a"): Link(rate=8e6)}
    >>> chain = Chain(model, devices, links, batch_size=16)
    >>> chain.even(), round(chain.latency((0, 1, 2)), 6)
    ((0, 1, 2), 0.002708)
    """

    model: Model
    devices: tuple[DeviceSpec, ...]
    """Devices in the order of the stages."""
    links: Mapping[Pair, Link]
    batch_size: int
    shares: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)
    """Transmitted bytes for each byte of activations, and for each byte of gradients; below 1 with lossy encoding."""

    supports_tied_weights: ClassVar[bool] = True
    """Whether a weight that units of several stages use may be cut: its copies on the stages are kept equal."""

    def __post_init__(self) -> None:
        cutting.check_counts(*self._counts)
        for source, target in _neighbour_pairs(self.devices):
            if (source, target) not in self.links:
                raise InputError(
                    f"{source} and {target} have neighbouring stages, but no link leads from {source} to {target}: add "
                    "one, or list the devices in the order in which they are linked",
                    ("network", "topology"),
                )

    @property
    def units(self) -> tuple[Unit, ...]:
        """The model's units in their order."""
        return self.model.units

    @property
    def _counts(self) -> tuple[int, int]:
        """Number of units and number of stages, the first arguments of the functions in `cuts`."""
        return len(self.units), len(self.devices)

    @cached_property
    def _cumulative_costs(self) -> list[Cost]:
        """Cost of a forward of one sample through all units before each cut."""
        costs = [unit.cost for unit in self.units]
        return [Cost(), *accumulate(costs)]

    @cached_property
    def _cumulative_parameters(self) -> list[int]:
        """Parameters of all units before each cut."""
        parameters = [unit.parameters for unit in self.units]
        return [0, *accumulate(parameters)]

    def forward_time(self, stage: int, first: int, stop: int, samples: int) -> float:
        """Return the seconds of a forward of units ``first`` to ``stop`` (exclusive)."""
        cost = forward_of(self._cost_of(first, stop), samples)
        return self.devices[stage].seconds(cost)

    def backward_time(self, stage: int, first: int, stop: int, samples: int) -> float:
        """Return the seconds of a backward of units ``first`` to ``stop`` (exclusive)."""
        cost = backward_of(self._cost_of(first, stop), samples)
        return self.devices[stage].seconds(cost)

    def _cost_of(self, first: int, stop: int) -> Cost:
        """Return the cost of a forward of one sample through units ``first`` to ``stop`` (exclusive)."""
        return self._cumulative_costs[stop] - self._cumulative_costs[first]

    def _parameters_of(self, first: int, stop: int) -> int:
        return self._cumulative_parameters[stop] - self._cumulative_parameters[first]

    def transfer_time(
        self, source: int, target: int, cut: int, samples: int
    ) -> tuple[float, float]:
        """Return the seconds for which the tensors of a cut occupy a link, and the seconds of the link's delay.

        ``source`` and ``target`` are neighbouring stages. An activation and its gradient have equally many values.
        """
        pair = (self.devices[source].name, self.devices[target].name)
        link = self.links[pair]
        activation_share, gradient_share = self.shares
        share = activation_share if source < target else gradient_share
        size = size_around(samples * self.model.cut_bytes(cut) * share)
        return link.transmission_time(size), link.delay

    def memory(self, stage: int, first: int, stop: int) -> float:
        """Return the bytes needed by a stage with units ``first`` to ``stop`` (exclusive)."""
        return inference_bytes(
            self.model,
            range(first, stop),
            self.batch_size,
            self.devices[stage].precision,
        )

    @cached_property
    def _stage_memory(self) -> StageBytes:
        """`memory` with a cache, since the dynamic programs evaluate the same stages several times."""
        return cache(self.memory)

    def _fitting_costs(self, costs: Costs) -> Costs:
        """Return costs that are infinite for stages beyond their device's memory and for unsupported cuts."""

        def stage(index: int, first: int, stop: int) -> float:
            needed = self._stage_memory(index, first, stop)
            if needed > self.devices[index].memory:
                return math.inf
            return costs.stage(index, first, stop)

        def boundary(index: int, cut: int) -> float:
            if self._tied_weight_across(cut) is not None:
                return math.inf
            return costs.boundary(index, cut)

        return Costs(stage, boundary)

    def _tied_weight_across(self, cut: int) -> TiedWeight | None:
        """Return a weight used on both sides of a cut if this forbids the cut; None if the cut is allowed."""
        if self.supports_tied_weights:
            return None
        return self.model.tied_weight_across(cut)

    def _check_tied(self, cuts: Cuts) -> None:
        """Raise `InputError` if a cut separates units with a common weight and this is not supported."""
        for cut in cuts[1:-1]:
            tied = self._tied_weight_across(cut)
            if tied is not None:
                names = [self.units[unit].name for unit in tied.units]
                units = " and ".join(names)
                raise InputError(
                    f"units {units} share a weight ({tied.title}), and stages that update at different times cannot "
                    "have a copy each: use pipeline, gpipe or model-parallelism, untie them, or use fewer stages",
                    ("method", "stages"),
                )

    @cached_property
    def _least_memory(self) -> tuple[float, Cuts]:
        """The partition whose fullest device is as empty as possible: that device's memory use (1: full), the cuts."""

        def no_cost(stage: int, cut: int) -> float:
            return 0.0

        costs = Costs(self._memory_share, no_cost)
        return cutting.best_cuts(*self._counts, costs, max)

    def _memory_share(self, stage: int, first: int, stop: int) -> float:
        """Return the bytes needed by a stage, as a fraction of the device's memory."""
        needed = self._stage_memory(stage, first, stop)
        return needed / self.devices[stage].memory

    @property
    def _fits(self) -> bool:
        """Whether some partition fits all devices."""
        share_of_fullest, _ = self._least_memory
        return share_of_fullest <= 1

    def check_memory(self, cuts: Cuts) -> None:
        """Raise `InputError` with a remedy if a stage exceeds the memory of the device."""
        shares = []
        for stage, (first, stop) in enumerate(pairwise(cuts)):
            shares.append(self._memory_share(stage, first, stop))
        largest = max(shares)
        if largest <= 1:
            return
        fullest = shares.index(largest)
        first, stop = cuts[fullest : fullest + 2]
        device = self.devices[fullest]
        need = self._stage_memory(fullest, first, stop)
        names = self.units[first].name
        if stop > first + 1:
            names += f" to {self.units[stop - 1].name}"
        raise InputError(
            f"{device.name} has {formats.size(device.memory)} of memory, but its part of the model ({names}) needs "
            f"{formats.size(need)} at batch_size {self.batch_size}: {self._memory_remedy()}",
            ("devices", device.name, "memory"),
        )

    def _memory_remedy(self) -> str:
        """Return a change of the scenario after which the model fits."""
        if self._fits:
            return "an optimal partition would fit"
        remedies = []
        batch_size = self._largest_fitting_batch()
        if batch_size:
            remedies.append(f"a batch_size of at most {batch_size} fits")
        devices = self._sufficient_devices()
        if devices:
            remedies.append(
                f"{devices} devices fit, the added ones like {self.devices[-1].name}"
            )
        if not remedies:
            return (
                "no smaller batch and no number of such devices fits; it takes devices with more memory or a smaller "
                "model"
            )
        return ", or ".join(remedies)

    def _largest_fitting_batch(self) -> int:
        """Return the largest smaller batch for which some partition fits; 0 if none fits."""

        def is_too_large(size: int) -> bool:
            return not self._with_batch(size)._fits

        # Memory grows with the batch, so the sizes that fit precede those that are too large. `bisect` returns the
        # number of sizes that fit. As the sizes begin with 1, this number is also the largest size that fits.
        smaller_sizes = range(1, self.batch_size)
        return bisect(smaller_sizes, False, key=is_too_large)

    def _with_batch(self, batch_size: int) -> Chain:
        return replace(self, batch_size=batch_size)

    def _sufficient_devices(self) -> int:
        """Return the least number of devices whose memory suffices for the model; 0 if no number suffices.

        The added devices are copies of the last one. Each device needs a unit, which limits the number.
        """
        last = self.devices[-1]
        devices = self.devices
        units, stages = self._counts
        for count in range(stages + 1, units + 1):
            copied = replace(last, name=f"{last.name}+{count - 1}")
            devices = (*devices, copied)
            # Memory does not depend on the rates of links.
            links = {pair: Link() for pair in _neighbour_pairs(devices)}
            if self._with_devices(devices, links)._fits:
                return count
        return 0

    def _with_devices(
        self, devices: tuple[DeviceSpec, ...], links: Mapping[Pair, Link]
    ) -> Chain:
        """Return the same chain over more devices: these are the present devices and copies of the last one."""
        return replace(self, devices=devices, links=links)

    @property
    def latency_costs(self) -> Costs:
        """Seconds of each stage and of each transfer; their sum is the time of one batch through all stages."""

        def stage(index: int, first: int, stop: int) -> float:
            return self.forward_time(index, first, stop, self.batch_size)

        def boundary(index: int, cut: int) -> float:
            following = index + 1
            busy, delay = self.transfer_time(index, following, cut, self.batch_size)
            return busy + delay

        return Costs(stage, boundary)

    def latency(self, cuts: Cuts) -> float:
        """Return the seconds of one batch through all stages, without the transfers of input and result."""
        return self.latency_costs.of(cuts, operator.add)

    def least_latency(self) -> Cuts:
        """Return the fitting partition with the least latency; raises `InputError` if none fits."""
        fitting = self._fitting_costs(self.latency_costs)
        best = cutting.least_total(*self._counts, fitting)
        return self._check_optimum(best)

    @property
    def passage_costs(self) -> Costs:
        """Seconds of each stage and of each transfer; their sum is the passage of a batch or micro-batch."""
        return self.latency_costs

    @property
    def bottleneck_costs(self) -> Costs:
        """Busy seconds of each stage and link for one batch; a link's delay does not count as busy."""

        def boundary(stage: int, cut: int) -> float:
            following = stage + 1
            busy, _ = self.transfer_time(stage, following, cut, self.batch_size)
            return busy

        return replace(self.latency_costs, boundary=boundary)

    def bottleneck(self, cuts: Cuts) -> float:
        """Return the seconds of the busiest stage or link per batch or micro-batch: the pace of a full pipeline."""
        return self.bottleneck_costs.of(cuts, max)

    def least_bottleneck(self) -> Cuts:
        """Return the fitting cuts of least bottleneck; of several such cuts, those of the shortest passage.

        Raises `InputError` if no cuts fit.
        """
        fitting = self._fitting_costs(self.bottleneck_costs)
        best = cutting.least_bottleneck(*self._counts, fitting, self.passage_costs)
        return self._check_optimum(best)

    def even(self) -> Cuts:
        """Return cuts into equally many units for each stage; raises `InputError` for insufficient memory."""
        cuts = cutting.even_cuts(*self._counts)
        self.check_memory(cuts)
        self._check_tied(cuts)
        return cuts

    def _check_optimum(self, best: tuple[float, Cuts]) -> Cuts:
        """Return the cuts of an optimum, (cost, cuts); raises `InputError` for an infinite cost."""
        cost, cuts = best
        if math.isinf(cost):
            # Cuts of infinite cost are arbitrary. If even the partition of least memory does not fit, memory is the
            # reason; otherwise the partition separates units with a tied weight.
            _, cuts_of_least_memory = self._least_memory
            self.check_memory(cuts_of_least_memory)
            self._check_tied(cuts_of_least_memory)
        return cuts


@dataclass(frozen=True)
class TrainingPipeline(Chain):
    """Training over devices in a row: activations flow forward, gradients backward."""

    state_values: float = field(default=0, kw_only=True)
    """Values the optimizer keeps per parameter, such as 1 for momentum."""

    @property
    def samples(self) -> int:
        """The largest number of samples that one forward or backward processes: those of a batch or micro-batch."""
        return self.batch_size

    @abstractmethod
    def stage_time(self, stage: int, first: int, stop: int) -> float:
        """Return the seconds of a stage per batch or micro-batch: forward, backward and a share of the update."""

    @abstractmethod
    def action_time(self, stage: int, first: int, stop: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""

    def samples_of(self, action: Action) -> int:
        """Return the number of samples processed by an action."""
        return self.samples

    @property
    def bottleneck_costs(self) -> Costs:
        """Busy seconds of each stage and each direction of a link, per batch or micro-batch."""

        def boundary(stage: int, cut: int) -> float:
            following = stage + 1
            forward, _ = self.transfer_time(stage, following, cut, self.samples)
            backward, _ = self.transfer_time(following, stage, cut, self.samples)
            # Each direction of a link has its own rate, so both transfer at the same time.
            return max(forward, backward)

        return Costs(cache(self.stage_time), boundary)

    @property
    def passage_costs(self) -> Costs:
        """Seconds of each stage and each round trip between stages; the sum is the passage forward and back."""

        def boundary(stage: int, cut: int) -> float:
            following = stage + 1
            forward = sum(self.transfer_time(stage, following, cut, self.samples))
            backward = sum(self.transfer_time(following, stage, cut, self.samples))
            return forward + backward

        return Costs(cache(self.stage_time), boundary)

    def simulate(self, cuts: Cuts, stages: Sequence[Sequence[Action]]) -> list[Slot]:
        """Return the start and end of all actions, in seconds; ``stages`` has the actions of each stage in order."""

        def duration(stage: int, action: Action) -> float:
            first, stop = cuts[stage : stage + 2]
            return self.action_time(stage, first, stop, action)

        def transfer(stage: int, action: Action) -> tuple[float, float]:
            samples = self.samples_of(action)
            first, stop = cuts[stage : stage + 2]
            if action.kind == "forward":
                return self.transfer_time(stage, stage + 1, stop, samples)
            return self.transfer_time(stage, stage - 1, first, samples)

        return simulate_schedule(stages, duration, transfer)


@dataclass(frozen=True)
class SynchronousPipeline(TrainingPipeline):
    """Training in a synchronous pipeline: micro-batches forward and back by a schedule, then one update.

    >>> from testbed.ml.models.catalog import create
    >>> from testbed.ml.schedule import one_forward_one_backward
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> devices = (DeviceSpec("a", speed=1e9, memory=1e9), DeviceSpec("b", speed=1e9, memory=1e9))
    >>> links = {("a", "b"): Link(rate=8e6), ("b", "a"): Link(rate=8e6)}
    >>> pipeline = SynchronousPipeline(model, devices, links, 16, micro_batches=4, schedule=one_forward_one_backward)
    >>> pipeline.step_time((0, 1, 2)) < 4 * pipeline.latency((0, 1, 2))
    True
    """

    micro_batches: int
    """Number of micro-batches of a batch."""
    schedule: Schedule
    update_flops: float = 2.0
    """Cost of an update in FLOPs per parameter."""
    recompute: bool = False
    """Whether all stages but the last forward a second time before they backward, instead of keeping activations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.micro_batches <= self.batch_size:
            raise InputError(
                f"a batch of {self.batch_size} cannot be cut into {self.micro_batches} micro-batches: "
                f"use 1 to {self.batch_size}",
                ("method", "micro_batches"),
            )

    @cached_property
    def _micro_batch_sizes(self) -> list[int]:
        """Samples of each micro-batch; the largest come first."""
        slices = cut_batch(self.batch_size, self.micro_batches)
        return [part.stop - part.start for part in slices]

    @cached_property
    def _samples_in_flight(self) -> list[int]:
        """By stage, the maximum number of samples between their forward and their backward."""
        stages = len(self.devices)
        samples = []
        for actions in actions_by_stage(self.schedule, stages, self.micro_batches):
            micro_batches = peak_in_flight(actions)
            # The largest micro-batches come first, so the sum of the first sizes is the maximum.
            samples.append(sum(self._micro_batch_sizes[:micro_batches]))
        return samples

    def memory(self, stage: int, first: int, stop: int) -> float:
        """Return the bytes needed by a stage with units ``first`` to ``stop`` (exclusive)."""
        samples = self._samples_in_flight[stage]
        inputs = 0
        if self._recomputes(stage):
            # The stage keeps the inputs of all micro-batches in flight, but the activations of one: the micro-batch
            # whose backward it computes.
            inputs = self.units[first].input_bytes * samples
            samples = self.samples
        training = training_bytes(
            self.model,
            range(first, stop),
            samples,
            self.state_values,
            precision=self.devices[stage].precision,
        )
        return training + inputs

    def _recomputes(self, stage: int) -> bool:
        is_last = stage + 1 == len(self.devices)
        return self.recompute and not is_last

    def backward_time(self, stage: int, first: int, stop: int, samples: int) -> float:
        """Return the seconds of a backward, including a repeated forward if activations are not kept."""
        seconds = super().backward_time(stage, first, stop, samples)
        if self._recomputes(stage):
            seconds += self.forward_time(stage, first, stop, samples)
        return seconds

    def _with_batch(self, batch_size: int) -> Chain:
        return replace(
            self,
            batch_size=batch_size,
            micro_batches=min(self.micro_batches, batch_size),
        )

    def update_time(self, stage: int, first: int, stop: int) -> float:
        """Return the seconds of the update at the end of a step."""
        flops = self.update_flops * self._parameters_of(first, stop)
        return self.devices[stage].seconds(Cost(flops))

    @property
    def samples(self) -> int:
        """Size of the largest micro-batch."""
        return self._micro_batch_sizes[0]

    def stage_time(self, stage: int, first: int, stop: int) -> float:
        """Return the seconds of a stage for the largest micro-batch: forward, backward and a share of the update."""
        forward = self.forward_time(stage, first, stop, self.samples)
        backward = self.backward_time(stage, first, stop, self.samples)
        update = self.update_time(stage, first, stop)
        return forward + backward + update / self.micro_batches

    def samples_of(self, action: Action) -> int:
        """Return the size of an action's micro-batch."""
        # `timeline` numbers micro-batches through all steps.
        position_in_step = action.micro % self.micro_batches
        return self._micro_batch_sizes[position_in_step]

    def action_time(self, stage: int, first: int, stop: int, action: Action) -> float:
        """Return the seconds of one action of a stage."""
        if action.kind == "update":
            return self.update_time(stage, first, stop)
        samples = self.samples_of(action)
        if action.kind == "forward":
            return self.forward_time(stage, first, stop, samples)
        return self.backward_time(stage, first, stop, samples)

    def least_step_time(self) -> Cuts:
        """Return the fitting partition with the least predicted `step_time`; raises `InputError` if none fits.

        With few micro-batches a pipeline spends much of a step filling and draining, so the passage matters more than
        the bottleneck. Therefore the candidates are all trade-offs between passage and bottleneck.
        """
        fitting = self._fitting_costs(self.bottleneck_costs)
        candidates = cutting.trade_offs(*self._counts, fitting, self.passage_costs)
        if not candidates:
            _, cuts_of_least_memory = self._least_memory
            self.check_memory(cuts_of_least_memory)
        return min(candidates, key=self.step_time)

    def timeline(self, cuts: Cuts, steps: int = 1) -> list[Slot]:
        """Return the times of each stage's actions over several consecutive steps, in seconds.

        Micro-batches are numbered through all steps. The first stage starts a step after its update.
        """
        count = self.micro_batches
        stages = []
        for actions in actions_by_stage(self.schedule, len(self.devices), count):
            repeated: list[Action] = []
            for step in range(steps):
                for action in actions:
                    number = step * count + action.micro
                    repeated.append(Action(action.kind, number))
                repeated.append(Action("update", step))
            stages.append(repeated)
        return self.simulate(cuts, stages)

    def step_time(self, cuts: Cuts) -> float:
        """Return the predicted seconds between the starts of two steps: the critical path of the schedule."""
        starts = []
        for slot in self.timeline(cuts, steps=3):
            is_forward = slot.stage == 0 and slot.action.kind == "forward"
            if is_forward and slot.action.micro % self.micro_batches == 0:
                starts.append(slot.start)
        # The first step may be shorter, since its stages do not wait for the updates of an earlier step.
        _, second_step, third_step = starts
        return third_step - second_step + self._tied_time(cuts)

    def _tied_time(self, cuts: Cuts) -> float:
        """Return the seconds added to a step by the exchange of the gradients of tied weights.

        A weight is tied if several units use it. Of the stages with a tied weight, the first is the summing stage: it
        adds the gradients of the other stages, which have copies of the weight, to its own gradient and returns the sum
        to them. Then all these stages update. A step becomes longer by two times:

        - the wait of the summing stage for the gradients of the copies, after its last backward,
        - the shift of the next step, if a stage with a copy receives the sum too late to begin the next step in time.
        """
        sizes = self._tied_sizes(cuts)
        if not sizes:
            return 0.0
        slots = self.timeline(cuts)
        # No exchange makes a step shorter.
        waits = [0.0]
        shifts = [0.0]
        for (summing, copy), size in sizes.items():
            are_neighbours = copy == summing + 1
            copy_starts = [slot.start for slot in slots if slot.stage == copy]
            first_start_of_copy = min(copy_starts)
            last_backward = _last_backward(slots, summing)
            sent = _last_backward(slots, copy).end
            if are_neighbours:
                # Gradients of activations occupy the same link first, until the last backward of the summing stage.
                sent = max(sent, last_backward.start)
            to_summing = sum(self._tied_transfer(copy, summing, size))
            waits.append(sent + to_summing - last_backward.end)
            busy, delay = self._tied_transfer(summing, copy, size)
            first, stop = cuts[summing : summing + 2]
            summing_update = self.update_time(summing, first, stop)
            copy_update = self.update_time(copy, *cuts[copy : copy + 2])
            # The next step begins after the update of the summing stage, and the copy's stage must be ready
            # ``first_start_of_copy`` seconds later. It is ready after the arrival of the sum and its own update.
            shifts.append(
                busy + delay + copy_update - summing_update - first_start_of_copy
            )
            if are_neighbours:
                # The first activation of the next step uses the same link after the sum.
                forward = self.forward_time(summing, first, stop, self.samples)
                shifts.append(busy - summing_update - forward)
        return max(waits) + max(shifts)

    def _tied_sizes(self, cuts: Cuts) -> dict[tuple[int, int], int]:
        """Return by (summing stage, stage with a copy) the bytes of the gradients of all their tied weights."""
        sizes: dict[tuple[int, int], int] = {}
        for tied in self.model.tied_weights:
            summing, *copies = tied.holders(cuts[:-1])
            for copy in copies:
                size = BYTES_PER_VALUE * tied.values
                sizes[summing, copy] = sizes.get((summing, copy), 0) + size
        return sizes

    def _tied_transfer(
        self, source: int, target: int, size: int
    ) -> tuple[float, float]:
        """Return the seconds for which gradients of tied weights occupy a link, and the delay of the link.

        Raises `InputError` if no link leads from ``source`` to ``target``.
        """
        names = (self.devices[source].name, self.devices[target].name)
        if names not in self.links:
            title = self.model.tied_weights[0].title
            raise InputError(
                f"{names[0]} and {names[1]} use the same weights ({title}) and send each other gradients, but no link "
                f"leads from {names[0]} to {names[1]}: use the topology mesh or add the link",
                ("network", "topology"),
            )
        link = self.links[names]
        return link.transmission_time(size_around(size)), link.delay


def _last_backward(slots: Sequence[Slot], stage: int) -> Slot:
    """Return the backward of a stage that ends last."""
    backwards = []
    for slot in slots:
        if slot.stage == stage and slot.action.kind == "backward":
            backwards.append(slot)
    return max(backwards, key=lambda slot: slot.end)
