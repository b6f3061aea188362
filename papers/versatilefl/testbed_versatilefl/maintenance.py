"""Section IV: substitution of missing values, the forward criterion, and saved gradients."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.layers.shard import State
from testbed.ml.models.slices import Channels
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import Outputs, Transmit, Values
from testbed.ml.slots.missing import ReceivedParts, Usable, Work, backpropagate
from testbed_versatilefl.planner import VersatileOptions

MOST_FORWARD = 0.5
"""The largest thres_fw; Section VI's, as the two values below."""
FORWARD_STEP = 0.1
"""Increase of thres_fw in each stage."""
MOST_REUSE = 10
"""gradReuse_bw in the first stage, from which each further stage subtracts one."""

Rates = tuple[float, ...]
"""Layer-to-layer success rates of one batch, from 0 to 1, beginning with the rate into layer 1."""
ConfirmLayer = Callable[[int, ReceivedParts], Awaitable[bool]]
"""Hook: return whether the other devices of a layer have received everything, too."""


class DynamicUpdate:
    """Section IV-C: thres_fw and gradReuse_bw become stricter, stage by stage, when the loss no longer improves.

    >>> from testbed_versatilefl.planner import VersatileOptions
    >>> update = DynamicUpdate(VersatileOptions())
    >>> update.thres_fw, update.grad_reuse_bw
    (0.0, 10)
    >>> update.stage = 3
    >>> update.thres_fw, update.grad_reuse_bw
    (0.3, 7)
    """

    def __init__(self, options: VersatileOptions) -> None:
        self.stage = 0
        """Number of the stage; the coordinator counts, since it sees the losses, and its casts carry the number."""
        self.options = options
        self._window = 0
        """The current window of `loss_window` steps."""
        self._losses: list[float] = []
        """Exact losses of the current window."""
        self._best = math.inf
        """The least mean loss of a window so far."""
        self._since: int | None = None
        """End of the window with the best loss, or the step at which the stage began if that is later."""

    @property
    def thres_fw(self) -> float:
        """The option `thres_fw`, or by stage: 0 in the first stage and 0.1 more in each further one, up to 0.5."""
        given = self.options.thres_fw
        if given is not None:
            return given
        # Rounded, since 3 * 0.1 exceeds 0.3 by a bit.
        return min(MOST_FORWARD, round(self.stage * FORWARD_STEP, 9))

    @property
    def grad_reuse_bw(self) -> int:
        """The option `grad_reuse_bw`, or by stage: 10 in the first stage and 1 less in each further one, down to 0."""
        given = self.options.grad_reuse_bw
        if given is not None:
            return given
        return max(0, MOST_REUSE - self.stage)

    def observe_loss(self, step: int, loss: float) -> None:
        """Add the exact loss of a step, in the order of steps; steps with missing results have no exact loss."""
        window, position = divmod(step, self.options.loss_window)
        if window != self._window:
            # The last steps of the previous window had no exact loss.
            self._close_window()
        self._window = window
        self._losses.append(loss)
        if position + 1 == self.options.loss_window:
            self._close_window()

    def _close_window(self) -> None:
        """Compare the mean loss of the current window with the best one so far, if the window has losses."""
        if not self._losses:
            return
        loss = fmean(self._losses)
        end = (self._window + 1) * self.options.loss_window
        self._losses.clear()
        # Section IV-C: "check whether the train loss becomes worse than the currently best model so far".
        if self._since is None or loss < self._best:
            self._best = loss
            self._since = end
        elif end - self._since >= self.options.patience:
            self.stage += 1
            self._since = end


def is_valid(
    rates: Iterable[float], thres_fw: float, equal_suffices: bool = False
) -> bool:
    """Return whether a batch meets the forward criterion of Section IV-A: each rate is larger than ``thres_fw``.

    With ``equal_suffices`` a rate equal to the threshold is accepted, too.

    >>> is_valid((1.0, 0.75), 0.5), is_valid((1.0, 0.5), 0.5)
    (True, False)
    >>> is_valid((1.0, 0.5), 0.5, equal_suffices=True)
    True
    """
    for rate in rates:
        # Rounded as the threshold is, since a mean of 0.2 and 0.4 exceeds 0.3 by a bit.
        excess = round(rate, 9) - thres_fw
        if excess < 0 or (excess == 0 and not equal_suffices):
            return False
    return True


def merge_rates(received: Sequence[Rates], layers: int) -> Rates:
    """Return the mean success rate into each of the first ``layers`` layers over the rates sent by several devices.

    Each device knows only its own receptions. Without any received rates, all are 0.

    >>> merge_rates([(1.0, 0.5), (1.0, 1.0)], layers=2)
    (1.0, 0.75)
    """
    if not received:
        return (0.0,) * layers
    means = []
    for layer in range(layers):
        total = sum(rates[layer] for rates in received)
        means.append(total / len(received))
    return tuple(means)


def _received_rates(received: ReceivedParts, layers: int) -> Rates:
    """Return the mean of the success rates in the received casts of a batch."""
    rates = []
    for part in received.parts:
        if part.tensor is None:
            continue
        note = part.note or {}
        rates.append(tuple(note["rates"]))
    return merge_rates(rates, layers)


@dataclass
class SavedGradients:
    """Section IV-B: the last new gradients of one layer, and the number of uses since."""

    gradients: State = field(default_factory=dict)
    used: int = 0
    """Number of updates with these gradients, except the first one."""


class Maintenance:
    """The hook `testbed.ml.slots.missing.MissingDataPolicy` of one device.

    A batch that is lost in its forward pass has no effect. If its losses are lost, saved gradients replace new ones.
    """

    # Equation (2): losses go to all neurons of the previous layer, also to those whose outputs were missing.
    masks_missing_outputs = False

    def __init__(self, update: DynamicUpdate, confirm: ConfirmLayer) -> None:
        self.casts_empty_messages = update.options.rearrangement
        """A device is judged by its casts (Section V-A), so it has to cast in every slot, also without values."""
        self.rates: dict[tuple[int, int], Rates] = {}
        """By layer and batch: the success rates of a forwarded batch up to this layer."""
        self._update = update
        self._confirm = confirm
        self._saved: defaultdict[int, SavedGradients] = defaultdict(SavedGradients)
        self._past: dict[tuple[int, str, Channels], torch.Tensor] = {}
        """By layer, sender and its neurons: the last complete outputs, averaged over the samples, (values,)."""
        self._dropped: set[tuple[int, int]] = set()
        """Layers and batches that did not meet the forward criterion here."""
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By layer: counts since the last `record_counts`."""

    def stop_maintaining(self) -> None:
        """Change the options to those of the baseline that `naive_baseline` names."""
        options = self._update.options
        baseline = options.baselines[options.naive_baseline]
        # Validated, since a baseline has values as in YAML, such as "100%".
        naive = type(options).model_validate(baseline)
        # Only the keys of the baseline: all other options stay as they are.
        changed = {key: getattr(naive, key) for key in baseline}
        self._update.options = options.model_copy(update=changed)

    def forget_layer(self, layer: int) -> None:
        """Forget the saved gradients of a layer after a change of neurons."""
        # Their shapes are those of the former neurons.
        self._saved.pop(layer, None)

    def record_counts(self, device: Device, step: int) -> None:
        """Record counts since the last call by layer: values due and missing, batches, updates."""
        for layer, counts in sorted(self._counts.items()):
            device.record("maintenance", step=step, layer=layer, **counts)
        self._counts.clear()

    def inputs(self, received: ReceivedParts) -> torch.Tensor | None:
        """Return inputs, (samples, values), with zeros for missing ones (equation 1).

        None if the forward criterion is not met.
        """
        layer = received.layer + 1
        rates = (*_received_rates(received, received.layer), received.success_rate)
        counts = self._counts[layer]
        for part in received.parts:
            size = len(part.neurons)
            counts["expected"] += size
            # Also 0, so that the event has the count if nothing is missing.
            counts["missing"] += size if part.tensor is None else 0
        if not self._accept_batch(layer, received, rates):
            return None
        self.rates[layer, received.batch] = rates
        return self._substitute(received).joined_values()

    def test_values(self, received: ReceivedParts) -> ReceivedParts | None:
        """Return the parts of the inputs, as in training; without substitution, None if any part is missing."""
        if self._update.options.substitution or received.is_complete:
            return self._substitute(received)
        return None

    def _substitute(self, received: ReceivedParts) -> ReceivedParts:
        """Replace missing outputs by past ones if `substitute_past_outputs` is set; otherwise they remain zeros."""
        if not self._update.options.substitute_past_outputs:
            return received
        parts = []
        for part in received.parts:
            outputs = part.tensor
            # With the neurons: after a rearrangement, the same sender has other neurons.
            key = (received.layer, part.sender, part.neurons)
            if outputs is not None and part.missing is None:
                self._past[key] = outputs.mean(dim=0)
            elif key in self._past:
                past = self._past[key].expand(received.samples, -1)
                if outputs is not None and part.missing is not None:
                    # A part that has arrived in pieces keeps its received values.
                    past = past.where(part.missing, outputs)
                part = part._replace(tensor=past)
            parts.append(part)
        return replace(received, parts=tuple(parts))

    def _accept_batch(self, layer: int, received: ReceivedParts, rates: Rates) -> bool:
        """Return whether layers may learn from a batch, and remember rejected batches."""
        key = (layer, received.batch)
        self._counts[layer]["batches"] += 1
        # The output layer asks again when its results are due.
        if key in self._dropped:
            return False
        if self._is_accepted(received, rates):
            return True
        self._dropped.add(key)
        self._counts[layer]["dropped"] += 1
        return False

    def _is_accepted(self, received: ReceivedParts, rates: Rates) -> bool:
        options = self._update.options
        if options.substitution is not True and not received.is_complete:
            return False
        if options.forward_criterion == "none":
            return True
        equal_suffices = options.forward_criterion == "at-least"
        return is_valid(rates, self._update.thres_fw, equal_suffices=equal_suffices)

    async def usable_results(self, received: ReceivedParts) -> Usable:
        """Return all results; a batch with missing results has no exact loss, and saved gradients are used.

        Section IV-B: only the precise granularities, by layer or by neuron, suit the sharing of results.
        """
        others_complete = True
        if self._update.options.result_sharing == "layer":
            others_complete = await self._confirm(received.layer, received)
        rates = _received_rates(received, received.layer)
        if not self._accept_batch(received.layer, received, rates):
            return Usable(None, "nothing")
        if received.is_complete and others_complete:
            return Usable(received.joined_values(), "new")
        return Usable(None, "saved")

    async def usable_losses(self, received: ReceivedParts) -> Usable:
        """Return the sum of the received losses, (samples, values), by equation (2).

        The option `backward_granularity` decides whether these losses give new gradients.
        """
        options = self._update.options
        layer = received.layer - 1
        others_complete = True
        if options.backward_granularity == "layer":
            # Figure 3(a): all transmissions to the layer must succeed, also those to its other devices.
            others_complete = await self._confirm(layer, received)
        received_count = 0
        for part in received.parts:
            received_count += part.tensor is not None
        if options.backward_granularity == "link":
            # Figure 3(c): any loss suffices, since zeros replace the missing ones.
            is_new = received_count > 0
        else:
            # Figure 3(b), and (a) with the other devices' confirmation.
            is_new = received_count == len(received.parts) and others_complete
        losses = None
        if received_count and (options.substitution or received.is_complete):
            losses = received.summed_losses()
        if self._was_dropped(layer, received.batch):
            # Earlier layers may have forwarded the batch, so that they still need its losses.
            return Usable(losses, "nothing")
        return Usable(losses, "new" if is_new else "saved")

    def _was_dropped(self, layer: int, batch: int) -> bool:
        """Return whether a batch was dropped at a layer, and forget earlier batches of the layer."""
        was_dropped = (layer, batch) in self._dropped
        for other_layer, other_batch in list(self._dropped):
            if other_layer == layer and other_batch <= batch:
                self._dropped.discard((other_layer, other_batch))
        return was_dropped

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: Usable,
    ) -> Work | None:
        """Return the work of learning from a gradient, (samples, values), or from saved ones as gradReuse_bw allows.

        The work returns the gradient by the layer's inputs. None if the layer has nothing to compute.
        """
        if usable.gradient_source == "nothing":
            return None
        saved = self._saved[layer]
        is_new = gradient is not None and usable.gradient_source == "new"
        reuses = not is_new and self._may_reuse(saved)
        if is_new:
            kind = "fresh"
        elif reuses:
            kind = "reused"
        else:
            kind = "idle"
        self._counts[layer][kind] += 1
        if gradient is None and not reuses:
            return None

        def work() -> torch.Tensor | None:
            input_gradient = None
            # The gradient of the inputs of layer 1 would go to the input layer, which learns nothing.
            if gradient is not None and (is_new or layer > 1):
                input_gradient = backpropagate(shard, layer, batch, gradient)
            if is_new:
                saved.gradients = shard.gradients()
                saved.used = 0
            else:
                # Losses were passed on, but these incomplete gradients do not count.
                shard.drop_gradients()
            if reuses:
                shard.add_gradients(saved.gradients)
                saved.used += 1
            if is_new or reuses:
                shard.update()
            return input_gradient

        return work

    def _may_reuse(self, saved: SavedGradients) -> bool:
        """Return whether saved gradients may be used once more."""
        # Section IV-B limits the uses, since each one has the effect of a larger learning rate.
        if not self._update.options.reuse_gradients:
            return False
        return saved.used < self._update.grad_reuse_bw and bool(saved.gradients)

    def observe_loss(self, step: int, loss: float) -> None:
        """Observe the loss of a step with complete results, on the coordinator."""
        self._update.observe_loss(step, loss)


@dataclass(frozen=True)
class Complete(TypedMessage, kind="complete", key=("batch", "layer", "sender")):
    """Cast to the other devices of a layer: all parts of a batch have arrived at the sender.

    Sent with the granularity ``layer`` only.
    """

    batch: int
    layer: int


class LayerConfirmation:
    """The hook `ConfirmLayer`: cast `Complete` to the other devices of a layer, and wait shortly for theirs.

    These casts can be lost as well; then the others count as incomplete.
    """

    def __init__(
        self, mailbox: Mailbox, assignment: Callable[[], NeuronAssignment], wait: float
    ) -> None:
        """``assignment`` returns the current assignment; ``wait`` is the time to wait for answers, in seconds."""
        self._mailbox = mailbox
        self._assignment = assignment
        self._wait = wait

    async def __call__(self, layer: int, received: ReceivedParts) -> bool:
        """Return whether the other devices of the layer have received all parts.

        True if this device lacks a part, because its own gradients are then incomplete in any case.
        """
        device = self._mailbox.device
        holders = self._assignment().holders(layer)
        others = [name for name in holders if name != device.name]
        if not received.is_complete or not others:
            return True
        message = Complete(received.batch, layer)
        await self._mailbox.cast(others, message)
        deadline = device.now() + self._wait
        answers = []
        for name in others:
            key = (received.batch, layer, name)
            answer = await self._mailbox.take(Complete, key, deadline=deadline)
            answers.append(answer)
        # Late answers of earlier batches would otherwise stay in the mailbox for the whole run.
        self._mailbox.discard_before(Complete, (received.batch,))
        return None not in answers


class ReliableResults:
    """A `Transmit` that sends the shared results of the output layer reliably, and all other casts by another one."""

    def __init__(self, mailbox: Mailbox, transmit: Transmit, output: int) -> None:
        """``output`` is the number of the output layer."""
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
        # Posted messages are repeated until they arrive, whatever the radio loses.
        for receiver in receivers:
            self._mailbox.post(receiver, message)
