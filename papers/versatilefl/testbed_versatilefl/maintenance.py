"""Section IV: substitution of missing values, the forward criterion, and saved gradients.

`Maintenance` treats incomplete batches on one device, by thresholds of `DynamicUpdate`, which change during training.
Two options need further classes: `LayerConfirmation` for the granularity ``layer``, and `ReliableResults` for ideal
result sharing.
"""

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
from testbed.ml.slots.missing import (
    BackwardWork,
    ReceivedParts,
    UsableValues,
    backpropagate,
)
from testbed_versatilefl.planner import VersatileOptions

MAX_THRES_FW = 0.5
"""The largest thres_fw; this value and the two below are those of Section VI."""
THRES_FW_INCREASE = 0.1
"""Increase of thres_fw in each stage."""
INITIAL_GRAD_REUSE = 10
"""gradReuse_bw in the first stage, from which each further stage subtracts one."""

Rates = tuple[float, ...]
"""Layer-to-layer success rates of one batch, from 0 to 1, beginning with the rate from layer 0 into layer 1."""
ConfirmLayer = Callable[[int, ReceivedParts], Awaitable[bool]]
"""Hook: (layer, parts received here) -> whether the other devices of the layer have received all their parts."""


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
        """Number of the stage. The coordinator, which observes the losses, counts, and its casts carry the number."""
        self.options = options
        self._window = 0
        """The current window of `loss_window` steps."""
        self._losses: list[float] = []
        """Exact losses of the current window."""
        self._best_loss = math.inf
        """The smallest mean loss of a window so far."""
        self._patience_start: int | None = None
        """Step from which the option `patience` counts: the end of the window with the best loss, or the later start of
        the stage."""

    @property
    def thres_fw(self) -> float:
        """The option `thres_fw`, or by stage: 0 in the first stage and 0.1 more in each further one, up to 0.5."""
        fixed_value = self.options.thres_fw
        if fixed_value is not None:
            return fixed_value
        # Rounded, since 3 * 0.1 exceeds 0.3 by a rounding error.
        value = round(self.stage * THRES_FW_INCREASE, 9)
        return min(MAX_THRES_FW, value)

    @property
    def grad_reuse_bw(self) -> int:
        """The option `grad_reuse_bw`, or by stage: 10 in the first stage and 1 less in each further one, down to 0."""
        fixed_value = self.options.grad_reuse_bw
        if fixed_value is not None:
            return fixed_value
        return max(0, INITIAL_GRAD_REUSE - self.stage)

    def observe_loss(self, step: int, loss: float) -> None:
        """Add the exact loss of a step, in the order of steps. A step with missing results has no exact loss."""
        window, position = divmod(step, self.options.loss_window)
        if window != self._window:
            # The last steps of the previous window had no exact loss.
            self._close_window()
        self._window = window
        self._losses.append(loss)
        if position + 1 == self.options.loss_window:
            self._close_window()

    def _close_window(self) -> None:
        """Compare the mean loss of the current window with the best one so far, and begin a stage if due."""
        if not self._losses:
            return
        loss = fmean(self._losses)
        end = (self._window + 1) * self.options.loss_window
        self._losses.clear()
        # Section IV-C: "check whether the train loss becomes worse than the currently best model so far".
        if self._patience_start is None or loss < self._best_loss:
            self._best_loss = loss
            self._patience_start = end
        elif end - self._patience_start >= self.options.patience:
            self.stage += 1
            self._patience_start = end


def is_valid(
    rates: Iterable[float], thres_fw: float, *, equal_suffices: bool = False
) -> bool:
    """Return whether a batch meets the forward criterion of Section IV-A: each rate is larger than ``thres_fw``.

    With ``equal_suffices`` a rate equal to the threshold is accepted, too.

    >>> is_valid((1.0, 0.75), 0.5), is_valid((1.0, 0.5), 0.5)
    (True, False)
    >>> is_valid((1.0, 0.5), 0.5, equal_suffices=True)
    True
    """
    for rate in rates:
        # Rounded like the threshold, since the mean of 0.2 and 0.4 exceeds 0.3 by a rounding error.
        excess = round(rate, 9) - thres_fw
        if excess < 0 or (excess == 0 and not equal_suffices):
            return False
    return True


def merge_rates(received: Sequence[Rates], layers: int) -> Rates:
    """Return the mean success rate into each of the layers 1 to ``layers`` over the rates sent by several devices.

    Each device knows the success rates of its own receptions only. Without any received rates, all rates are 0.

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
    """Section IV-B: the newest gradients of one layer, for updates in which new gradients are missing."""

    gradients: State = field(default_factory=dict)
    reuse_count: int = 0
    """Number of updates with these gradients after the first one."""


class Maintenance:
    """The hook `testbed.ml.slots.missing.MissingDataPolicy` of one device.

    A batch that is dropped in its forward pass has no effect. If the losses of a batch are missing, saved gradients
    replace new ones.
    """

    # Equation (2): losses go to all neurons of the previous layer, also to neurons whose outputs were missing.
    masks_missing_outputs = False

    def __init__(self, update: DynamicUpdate, confirm: ConfirmLayer) -> None:
        self.casts_empty_messages = update.options.rearrangement
        """A device is judged by its casts (Section V-A), so it has to cast in every slot, also without values."""
        self.rates: dict[tuple[int, int], Rates] = {}
        """(layer, batch) -> success rates of a forwarded batch up to this layer, until the device has cast them."""
        self._update = update
        self._confirm = confirm
        self._saved: defaultdict[int, SavedGradients] = defaultdict(SavedGradients)
        """Layer -> its saved gradients."""
        self._past_outputs: dict[tuple[int, str, Channels], torch.Tensor] = {}
        """(layer, sender, its neurons) -> last complete outputs, averaged over the samples, (values,)."""
        self._dropped_batches: set[tuple[int, int]] = set()
        """(layer, batch) of each batch that this device has dropped at a layer."""
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """Layer -> counts since the last `record_counts`."""

    def stop_maintaining(self) -> None:
        """Change the options to those of the baseline that `naive_baseline` names."""
        options = self._update.options
        baseline = options.baselines[options.naive_baseline]
        # Validated, since a baseline has values as in YAML, such as "100%".
        baseline_options = type(options).model_validate(baseline)
        # Only the keys of the baseline change; all other options stay as they are.
        changes = {key: getattr(baseline_options, key) for key in baseline}
        self._update.options = options.model_copy(update=changes)

    def forget_layer(self, layer: int) -> None:
        """Forget the saved gradients of a layer whose neurons have changed: the gradients have the former shapes."""
        self._saved.pop(layer, None)

    def record_counts(self, device: Device, step: int) -> None:
        """Record the counts of each layer since the last call: expected and missing neurons, batches, updates."""
        for layer, counts in sorted(self._counts.items()):
            device.record("maintenance", step=step, layer=layer, **counts)
        self._counts.clear()

    def inputs(self, received: ReceivedParts) -> torch.Tensor | None:
        """Return the inputs of the next layer, (samples, values), with missing values replaced (equation 1).

        Returns None to drop the batch.
        """
        layer = received.layer + 1
        rates = (*_received_rates(received, received.layer), received.success_rate)
        counts = self._counts[layer]
        for part in received.parts:
            size = len(part.neurons)
            counts["expected"] += size
            # Adding 0 creates the count, so that the event has it even if nothing is missing.
            counts["missing"] += size if part.tensor is None else 0
        if not self._accept_batch(layer, received, rates):
            return None
        self.rates[layer, received.batch] = rates
        return self._substitute(received).joined_values()

    def test_values(self, received: ReceivedParts) -> ReceivedParts | None:
        """Return the parts with missing values replaced; None, without substitution, if any value is missing."""
        if self._update.options.substitution or received.is_complete:
            return self._substitute(received)
        return None

    def _substitute(self, received: ReceivedParts) -> ReceivedParts:
        """Return the parts with past outputs in place of missing ones, if `substitute_past_outputs` is set.

        Otherwise missing outputs count as zeros, without a change of the parts.
        """
        if not self._update.options.substitute_past_outputs:
            return received
        parts = []
        for part in received.parts:
            outputs = part.tensor
            # The key has the neurons, too, since a sender has other neurons after a rearrangement.
            key = (received.layer, part.sender, part.neurons)
            if outputs is not None and part.missing is None:
                self._past_outputs[key] = outputs.mean(dim=0)
            elif key in self._past_outputs:
                past = self._past_outputs[key].expand(received.samples, -1)
                if outputs is not None and part.missing is not None:
                    # Of a part that has arrived incompletely, only the missing values are replaced.
                    past = past.where(part.missing, outputs)
                part = part._replace(tensor=past)
            parts.append(part)
        return replace(received, parts=tuple(parts))

    def _accept_batch(self, layer: int, received: ReceivedParts, rates: Rates) -> bool:
        """Return whether a layer may use a batch; otherwise record the batch as dropped."""
        key = (layer, received.batch)
        self._counts[layer]["batches"] += 1
        # The output layer decides twice: about its inputs, and about the shared results.
        if key in self._dropped_batches:
            return False
        if self._meets_criteria(received, rates):
            return True
        self._dropped_batches.add(key)
        self._counts[layer]["dropped"] += 1
        return False

    def _meets_criteria(self, received: ReceivedParts, rates: Rates) -> bool:
        options = self._update.options
        if options.substitution is not True and not received.is_complete:
            return False
        if options.forward_criterion == "none":
            return True
        equal_suffices = options.forward_criterion == "at-least"
        return is_valid(rates, self._update.thres_fw, equal_suffices=equal_suffices)

    async def usable_results(self, received: ReceivedParts) -> UsableValues:
        """Return the shared results if all have arrived; otherwise the layer uses saved gradients.

        Section IV-B: only the precise granularities, by layer or by neuron, suit the sharing of results.
        """
        others_complete = True
        if self._update.options.result_sharing == "layer":
            others_complete = await self._confirm(received.layer, received)
        rates = _received_rates(received, received.layer)
        if not self._accept_batch(received.layer, received, rates):
            return UsableValues(None, "nothing")
        if received.is_complete and others_complete:
            return UsableValues(received.joined_values(), "new")
        return UsableValues(None, "saved")

    async def usable_losses(self, received: ReceivedParts) -> UsableValues:
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
            if part.tensor is not None:
                received_count += 1
        if options.backward_granularity == "link":
            # Figure 3(c): any loss suffices, since zeros replace the missing ones.
            is_new = received_count > 0
        else:
            # Figure 3(b): all losses for this device's neurons. Figure 3(a): with the other devices' confirmation.
            is_new = received_count == len(received.parts) and others_complete
        losses = None
        if received_count and (options.substitution or received.is_complete):
            losses = received.summed_losses()
        if self._was_dropped(layer, received.batch):
            # Previous layers may have forwarded the batch and learn from it, so the losses are passed on.
            return UsableValues(losses, "nothing")
        return UsableValues(losses, "new" if is_new else "saved")

    def _was_dropped(self, layer: int, batch: int) -> bool:
        """Return whether a batch was dropped at a layer, and forget earlier batches of the layer."""
        was_dropped = (layer, batch) in self._dropped_batches
        for dropped_layer, dropped_batch in list(self._dropped_batches):
            if dropped_layer == layer and dropped_batch <= batch:
                self._dropped_batches.discard((dropped_layer, dropped_batch))
        return was_dropped

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: UsableValues,
    ) -> BackwardWork | None:
        """Return the computation of a backward: learning from ``gradient``, (samples, values), or from saved gradients.

        The computation returns the gradient of the layer's inputs. None if the layer has nothing to compute.
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
            # Without learning, layer 1 has nothing to compute: the input layer, which has no weights, needs no losses.
            if gradient is not None and (is_new or layer > 1):
                input_gradient = backpropagate(shard, layer, batch, gradient)
            if is_new:
                saved.gradients = shard.gradients()
                saved.reuse_count = 0
            else:
                # The gradients of the weights are incomplete: only the gradient of the inputs is passed on.
                shard.drop_gradients()
            if reuses:
                shard.add_gradients(saved.gradients)
                saved.reuse_count += 1
            if is_new or reuses:
                shard.update()
            return input_gradient

        return work

    def _may_reuse(self, saved: SavedGradients) -> bool:
        """Return whether saved gradients may be used once more."""
        # Section IV-B limits the number of uses, since each use has the effect of a larger learning rate.
        if not self._update.options.reuse_gradients:
            return False
        is_within_limit = saved.reuse_count < self._update.grad_reuse_bw
        return is_within_limit and bool(saved.gradients)

    def observe_loss(self, step: int, loss: float) -> None:
        """Observe the loss of a step with complete results, on the coordinator."""
        self._update.observe_loss(step, loss)


@dataclass(frozen=True)
class Complete(TypedMessage, kind="complete", key=("batch", "layer", "sender")):
    """Cast to the other devices of a layer: all parts of a batch have arrived at the sender.

    Used with the granularity ``layer`` only.
    """

    batch: int
    layer: int


class LayerConfirmation:
    """The hook `ConfirmLayer`: cast `Complete` to the other devices of a layer, and wait shortly for their casts.

    These casts can be lost as well; then the sender counts as a device that has not received everything.
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

        Without asking the others, return True if this device itself lacks a part: its gradients are incomplete anyway.
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
        # Answers of earlier batches that arrived too late would stay in the mailbox for the whole run.
        self._mailbox.discard_before(Complete, (received.batch,))
        return None not in answers


class ReliableResults:
    """A `Transmit` sending the shared results of the output layer reliably, and casting all other values."""

    def __init__(self, mailbox: Mailbox, transmit: Transmit, output_layer: int) -> None:
        """``transmit`` is the strategy for all other values."""
        self._mailbox = mailbox
        self._transmit = transmit
        self._output_layer = output_layer
        self.on_arrival = transmit.on_arrival

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Send shared results reliably, and cast any other message."""
        is_result = isinstance(message, Outputs) and message.layer == self._output_layer
        if not is_result:
            await self._transmit(receivers, message, until)
            return
        # Posted messages are repeated until they arrive, unlike casts.
        for receiver in receivers:
            self._mailbox.post(receiver, message)
