"""Section IV: substitution of missing values. Substitution, the forward criterion, and saved gradients."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.layers.shard import State
from testbed.ml.models.slices import Channels
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import Outputs, Transmit, Values
from testbed.ml.slots.missing import Arrived, Usable, Work, backpropagate
from testbed_versatilefl.planner import VersatileOptions

MOST_FORWARD = 0.5
FORWARD_STEP = 0.1
MOST_REUSE = 10

Rates = tuple[float, ...]
"""Layer-to-layer success rates of one batch, from 0 to 1: into layer 1 first."""
Confirm = Callable[[int, Arrived], Awaitable[bool]]
"""From a layer, and what has arrived for the own neurons of it, to whether its other devices have everything, too."""


class DynamicUpdate:
    """Section IV-C: thres_fw and gradReuse_bw become stricter, stage by stage, as the loss no longer improves."""

    def __init__(self, options: VersatileOptions) -> None:
        self.stage = 0
        """Counted by the device that leads, and sent along with casts."""
        self.options = options
        self._window, self._losses = 0, list[float]()
        """The present window of `stage_window` steps, and the exact losses of its steps."""
        self._best = math.inf
        self._since: int | None = None
        """Step after the window of the best loss, or after that with which the stage began if that is later."""

    @property
    def thres_fw(self) -> float:
        """As given, or 0, then 0.1 more in each stage, up to 0.5."""
        given = self.options.thres_fw
        return (
            min(MOST_FORWARD, round(self.stage * FORWARD_STEP, 9))
            if given is None
            else given
        )

    @property
    def grad_reuse_bw(self) -> int:
        """As given, or 10, then 1 less in each stage, down to 0."""
        given = self.options.grad_reuse
        return max(0, MOST_REUSE - self.stage) if given is None else given

    def observe_loss(self, step: int, loss: float) -> None:
        """Take the exact loss of a step, in the order of steps; those of which results are missing are left out."""
        window, last = divmod(step, self.options.stage_window)
        if window != self._window:
            self._close()
        self._window = window
        self._losses.append(loss)
        if last + 1 == self.options.stage_window:
            self._close()

    def _close(self) -> None:
        """Compare the mean loss of the present window, if any was seen, with the best before."""
        if not self._losses:
            return
        loss, end = fmean(self._losses), (self._window + 1) * self.options.stage_window
        self._losses.clear()
        if self._since is None or loss < self._best:
            self._best, self._since = loss, end
        elif end - self._since >= self.options.patience:
            self.stage, self._since = self.stage + 1, end


def is_valid(rates: Iterable[float], thres_fw: float) -> bool:
    """Return whether a batch may go on: each rate is at least ``thres_fw``. The paper says larger, but accepts 0.5."""
    return all(rate >= thres_fw for rate in rates)


def merge_rates(heard: Sequence[Rates], layers: int) -> Rates:
    """Return the rates into this many layers, from those that the devices of the last of them have sent.

    Each device knows only what it received itself; the rate of a layer is the mean over those that were heard, 0 where
    nobody was.
    """
    return tuple(
        sum(rates[layer] for rates in heard) / len(heard) if heard else 0.0
        for layer in range(layers)
    )


def _heard_rates(arrived: Arrived, layers: int) -> Rates:
    notes = [part.note or {} for part in arrived.parts if part.tensor is not None]
    return merge_rates([tuple(note["rates"]) for note in notes], layers)


@dataclass
class SavedGradients:
    """Section IV-B: the last new gradients of one layer, and how often they were used since."""

    gradients: State = field(default_factory=dict)
    used: int = 0


class Maintenance:
    """The hook `testbed.ml.slots.missing.MissingDataPolicy` of one device.

    Of a batch that is lost on its way forward, nothing is learnt; where its losses are lost, saved gradients are used.
    """

    masks = False

    def __init__(self, update: DynamicUpdate, confirm: Confirm) -> None:
        self.announces = update.options.rearrangement
        """By what is received of a device, the others judge it."""
        self.rates: dict[tuple[int, int], Rates] = {}
        """By layer and number of a batch that was forwarded here: of its way up to that layer."""
        self._update = update
        self._confirm = confirm
        self._saved: defaultdict[int, SavedGradients] = defaultdict(SavedGradients)
        self._past: dict[tuple[int, str, Channels], torch.Tensor] = {}
        """By layer, sender and its neurons: the mean over the samples of what last arrived whole, (values,)."""
        self._dropped: set[tuple[int, int]] = set()
        """Layers and numbers of the batches that went no further here."""
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By layer, since the last `report`."""

    def stop_maintaining(self) -> None:
        """Go on as the baseline Naive."""
        options = self._update.options
        baseline = options.baselines[options.naive]
        given = type(options).model_validate(baseline)
        self._update.options = options.model_copy(
            update={key: getattr(given, key) for key in baseline}
        )

    def forget_layer(self, layer: int) -> None:
        """Forget the saved values of a layer after its neurons have changed."""
        self._saved.pop(layer, None)

    def record_counts(self, device: Device, step: int) -> None:
        """Record counts since the last call by layer: values due and missing, batches, updates."""
        for layer, counts in sorted(self._counts.items()):
            device.record("maintenance", step=step, layer=layer, **counts)
        self._counts.clear()

    def inputs(self, arrived: Arrived) -> torch.Tensor | None:
        """Return inputs, (samples, values), zeros for missing ones (equation 1), if the forward criterion is met."""
        layer, rates = (
            arrived.layer + 1,
            (*_heard_rates(arrived, arrived.layer), arrived.rate),
        )
        for part in arrived.parts:
            self._counts[layer]["due"] += len(part.neurons)
            self._counts[layer]["missing"] += len(part.neurons) * (part.tensor is None)
        if not self._accept_batch(layer, arrived, rates):
            return None
        self.rates[layer, arrived.batch] = rates
        return self._substituted(arrived).joined_values()

    def test_values(self, arrived: Arrived) -> Arrived | None:
        """Return the parts of the inputs, as in training; without substitution, None if any part is missing."""
        return (
            self._substituted(arrived)
            if self._update.options.substitution or arrived.complete
            else None
        )

    def _substituted(self, arrived: Arrived) -> Arrived:
        """Put past outputs, if these are to be substitutes, in the place of missing ones, which else are zeros."""
        if not self._update.options.past:
            return arrived
        parts = []
        for part in arrived.parts:
            sent, key = part.tensor, (arrived.layer, part.sender, part.neurons)
            if sent is not None and part.missing is None:
                self._past[key] = sent.mean(dim=0)
            elif key in self._past:
                past = self._past[key].expand(arrived.samples, -1)
                mixed = (
                    past
                    if sent is None or part.missing is None
                    else past.where(part.missing, sent)
                )
                part = part._replace(tensor=mixed)
            parts.append(part)
        return replace(arrived, parts=tuple(parts))

    def _accept_batch(self, layer: int, arrived: Arrived, rates: Rates) -> bool:
        """Return whether a batch goes on to be learnt from, and keep in mind where it does not."""
        key = (layer, arrived.batch)
        self._counts[layer]["batches"] += 1
        if key in self._dropped:
            return False
        if is_valid(rates, self._update.thres_fw) and (
            self._update.options.substitution or arrived.complete
        ):
            return True
        self._dropped.add(key)
        self._counts[layer]["dropped"] += 1
        return False

    async def usable_results(self, arrived: Arrived) -> Usable:
        """Return all results; those of a batch of which some are missing give no exact loss."""
        others = self._update.options.sharing != "layer" or await self._confirm(
            arrived.layer, arrived
        )
        if not self._accept_batch(
            arrived.layer, arrived, _heard_rates(arrived, arrived.layer)
        ):
            return Usable(None, "nothing")
        return (
            Usable(arrived.joined_values(), "new")
            if arrived.complete and others
            else Usable(None, "saved")
        )

    async def usable_losses(self, arrived: Arrived) -> Usable:
        """Return the sum of the losses that have arrived (equation 2); they are new gradients by the granularity."""
        layer, granularity = arrived.layer - 1, self._update.options.backward
        others = granularity != "layer" or await self._confirm(layer, arrived)
        here = sum(part.tensor is not None for part in arrived.parts)
        enough = (
            here > 0 if granularity == "link" else here == len(arrived.parts) and others
        )
        usable = here > 0 and (self._update.options.substitution or arrived.complete)
        losses = arrived.summed_losses() if usable else None
        if self._was_dropped(layer, arrived.batch):
            return Usable(losses, "nothing")
        return Usable(losses, "new" if enough else "saved")

    def _was_dropped(self, layer: int, batch: int) -> bool:
        """Return whether a batch went no further than a layer, and forget earlier batches of the layer."""
        dropped = (layer, batch) in self._dropped
        self._dropped -= {
            each for each in self._dropped if each[0] == layer and each[1] <= batch
        }
        return dropped

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: Usable,
    ) -> Work | None:
        """Learn from new gradients, (samples, values), or saved ones while gradReuse_bw allows it; pass losses on."""
        if usable.learns == "nothing":
            return None
        saved, options = self._saved[layer], self._update.options
        new = gradient is not None and usable.learns == "new"
        reuses = (
            not new
            and options.reuse
            and bool(saved.gradients)
            and saved.used < self._update.grad_reuse_bw
        )
        self._counts[layer]["fresh" if new else "reused" if reuses else "idle"] += 1
        if gradient is None and not reuses:
            return None

        def work() -> torch.Tensor | None:
            before = None
            if gradient is not None and (new or layer > 1):
                before = backpropagate(shard, layer, batch, gradient)
            if new:
                saved.gradients, saved.used = shard.gradients(), 0
            else:
                shard.drop_gradients()
            if reuses:
                shard.add_gradients(saved.gradients)
                saved.used += 1
            if new or reuses:
                shard.update()
            return before

        return work

    def observe_loss(self, step: int, loss: float) -> None:
        """Take the loss of a step whose results are complete, on the device that leads."""
        self._update.observe_loss(step, loss)


@dataclass(frozen=True)
class Complete(Typed, kind="complete", key=("batch", "layer", "sender")):
    """Cast to the others of a layer: everything of a batch has arrived here. Only for the granularity ``layer``."""

    batch: int
    layer: int


class Confirming:
    """The hook `Confirm`: casts to the others of a layer that all is here, and waits a moment for theirs.

    Those casts are lost as any; then the others count as incomplete.
    """

    def __init__(
        self, mailbox: Mailbox, arrangement: Callable[[], NeuronAssignment], wait: float
    ) -> None:
        """``arrangement`` returns the present one; ``wait`` is in seconds."""
        self._mailbox = mailbox
        self._arrangement = arrangement
        self._wait = wait

    async def __call__(self, layer: int, arrived: Arrived) -> bool:
        """Return whether the others have everything, too; True where not even this device has."""
        device = self._mailbox.device
        others = [
            name for name in self._arrangement().holders(layer) if name != device.name
        ]
        if not arrived.complete or not others:
            return True
        await self._mailbox.cast(others, Complete(arrived.batch, layer))
        deadline = device.now() + self._wait
        found = [
            await self._mailbox.take(
                Complete, (arrived.batch, layer, name), deadline=deadline
            )
            for name in others
        ]
        self._mailbox.discard_before(Complete, (arrived.batch,))
        return None not in found


class Ideal:
    """Casts as another `Transmit` does, but for the results that the output layer shares: none of these is lost."""

    def __init__(self, mailbox: Mailbox, transmit: Transmit, output: int) -> None:
        """``output``: the number of the output layer."""
        self._mailbox = mailbox
        self._transmit = transmit
        self._output = output
        self.on_arrival = transmit.on_arrival

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Cast, or send reliably."""
        if not isinstance(message, Outputs) or message.layer != self._output:
            await self._transmit(receivers, message, until)
            return
        for receiver in receivers:
            self._mailbox.post(receiver, message)
