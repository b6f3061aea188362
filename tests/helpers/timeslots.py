"""A reference in numpy for EdgePipe and VersatileFL, written from their papers, for the casts received in a run.

It imports nothing of the methods or their packages. All groups have equally many layers, as in the papers, and neurons
stay on their devices. Layers count from 0, the input layer, and batches from 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np


@dataclass
class RunSetting:
    """The inputs of a run."""

    groups: list[list[str]]
    """Devices by group; all groups have equally many layers."""
    weights: list[tuple[np.ndarray, np.ndarray]]
    """Initial weights (outputs, inputs) and biases (outputs,) from layer 1 on."""
    batches: list[tuple[np.ndarray, np.ndarray]]
    """Samples (samples, values) and labels of each batch."""
    rate: float
    """Learning rate."""
    received: set[tuple[str, str, int]]
    """Received casts as (sender, receiver, number of the cast at its sender)."""


@dataclass
class ReferenceDevice:
    """The state of one device."""

    weights: dict[int, np.ndarray]
    biases: dict[int, np.ndarray]
    inbox: defaultdict = field(default_factory=lambda: defaultdict(dict))
    """Messages by (kind, layer, batch), then by sender."""
    forwards: dict = field(default_factory=dict)
    """Inputs, weights, outputs and missing inputs of each forward pass, by (layer, batch)."""
    casts: int = 0
    """Number of casts sent."""
    stage: int = 0
    """VersatileFL's stage of training, which determines default thresholds."""
    dropped: set = field(default_factory=set)
    """Forward passes (layer, batch) that failed the criterion of VersatileFL."""
    saved: dict = field(default_factory=dict)
    """The newest complete gradients by layer, for reuse."""
    reuses: Counter = field(default_factory=Counter)
    """Number of updates with the saved gradients of each layer."""
    rates: dict = field(default_factory=dict)
    """Success rates that the outputs of (layer, batch) carry."""
    past: dict = field(default_factory=dict)
    """Mean of the newest outputs by (layer, sender)."""


class EdgePipeReference:
    """EdgePipe, section V: a device computes one pass of a layer in a timeslot; missing values count as zero."""

    def __init__(self, setting, update_condition="all_losses"):
        self.setting, self.update_condition = setting, update_condition
        samples, _ = setting.batches[0]
        self.sizes = [samples.shape[1], *(len(bias) for _, bias in setting.weights)]
        self.layers = len(self.sizes)
        self.group_layers = self.layers // len(setting.groups)  # M_layers of the paper
        # A group computes 2 M_layers passes of a batch. A single group has one pass less, since the input layer has no
        # backward pass.
        if len(setting.groups) > 1:
            self.period = 2 * self.group_layers
        else:
            self.period = 2 * self.layers - 1
        self.nodes, self.losses = {}, []
        for group, names in enumerate(setting.groups):
            first = group * self.group_layers
            layers = range(first, first + self.group_layers)
            for name in names:
                self.nodes[name] = self.make_device(name, layers)

    def make_device(self, name, layers):
        """Return a device with the weights of its neurons; the input layer has none."""
        weights, biases = {}, {}
        for layer in layers:
            if layer > 0:
                layer_weights, layer_biases = self.setting.weights[layer - 1]
                rows = self.neurons(name, layer)
                weights[layer] = layer_weights[rows].copy()
                biases[layer] = layer_biases[rows].copy()
        return ReferenceDevice(weights, biases)

    def holders(self, layer):
        """Return the devices that hold neurons of a layer."""
        return self.setting.groups[layer // self.group_layers]

    def neurons(self, name, layer):
        """Return the slice of a layer's neurons on one device."""
        names = self.holders(layer)
        index, size = names.index(name), self.sizes[layer]
        return slice(size * index // len(names), size * (index + 1) // len(names))

    @property
    def coordinator(self):
        return self.setting.groups[-1][0]

    def train(self):
        """Simulate all timeslots; a cast of one slot can be used from the next slot on."""
        last_start = self.period * (len(self.setting.batches) - 1)
        for slot in range(2 * self.layers - 1 + last_start):
            deliveries = []
            for layer in range(self.layers):
                deliveries += self.passes(layer, slot)
            # Deliver after all layers have computed, so that no device sees a cast of the same slot.
            for receiver, key, sender, message in deliveries:
                self.nodes[receiver].inbox[key][sender] = message
        return self

    def passes(self, layer, slot):
        """Compute the passes of a layer that are due in a slot, and return their deliveries."""
        deliveries = []
        # Batch b passes layer l forward in slot b * period + l, and backward 2 * (layers - l) - 1 slots later.
        starts = [(layer, self.forward)]
        if layer > 0:
            starts.append((2 * self.layers - 1 - layer, self.backward))
        for first_slot, compute in starts:
            batch, slots_since_start = divmod(slot - first_slot, self.period)
            is_due = slots_since_start == 0
            if is_due and 0 <= batch < len(self.setting.batches):
                for name in self.holders(layer):
                    deliveries += compute(name, layer, batch)
        return deliveries

    def cast(self, name, kind, layer, batch, values):
        """Return the deliveries (receiver, key, sender, message) of a cast, by the casts received in the run."""
        target_layer = layer - 1
        if kind == "outputs":
            # The devices of the output layer exchange their outputs.
            target_layer = min(layer + 1, self.layers - 1)
        node, targets = self.nodes[name], self.holders(target_layer)
        message = self.message(node, kind, layer, batch, values)
        receivers = [name] if name in targets else []
        others = [target for target in targets if target != name]
        if others:
            for other in others:
                if (name, other, node.casts) in self.setting.received:
                    receivers.append(other)
            # Casts count only if they are transmitted, so not if the device itself is the only target.
            node.casts += 1
        key = kind, layer, batch
        return [(receiver, key, name, message) for receiver in receivers]

    def message(self, node, kind, layer, batch, values):
        """Return a message: values, success rates and stage; EdgePipe uses the values only."""
        return values, (), node.stage

    def take(self, name, kind, layer, batch):
        """Remove and return the received messages about a layer, by sender."""
        return self.nodes[name].inbox.pop((kind, layer, batch), {})

    def assemble(self, layer, batch, messages):
        """Return the outputs of a layer with zeros for missing ones, and a mask of the missing ones."""
        samples, _ = self.setting.batches[batch]
        outputs = np.zeros((len(samples), self.sizes[layer]), np.float32)
        missing = np.ones(self.sizes[layer], bool)
        for sender, (values, *_) in messages.items():
            neurons = self.neurons(sender, layer)
            outputs[:, neurons] = values
            missing[neurons] = False
        return outputs, missing

    def forward(self, name, layer, batch):
        if layer == 0:
            images, _ = self.setting.batches[batch]
            return self.cast(
                name, "outputs", 0, batch, images[:, self.neurons(name, 0)]
            )
        messages = self.take(name, "outputs", layer - 1, batch)
        if not self.continues(name, layer, batch, messages):
            return []
        node = self.nodes[name]
        inputs, missing = self.assemble(layer - 1, batch, messages)
        self.substitute(node, layer - 1, messages, inputs)
        outputs = inputs @ node.weights[layer].T + node.biases[layer]
        if layer < self.layers - 1:
            outputs = np.maximum(outputs, 0)
        weights = node.weights[layer].copy()
        node.forwards[layer, batch] = inputs, weights, outputs, missing
        return self.cast(name, "outputs", layer, batch, outputs)

    def continues(self, name, layer, batch, messages):
        """Return whether a forward pass is computed."""
        return True

    def substitute(self, node, layer, messages, inputs):
        """Replace missing inputs in place; EdgePipe leaves zeros."""

    def cross_entropy(self, results, batch):
        """Return the mean loss and its gradient with respect to the results."""
        _, labels = self.setting.batches[batch]
        shifted = results - results.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        gradient = np.exp(logs)
        gradient[rows, labels] -= 1
        return float(-logs[rows, labels].mean()), gradient / len(labels)

    def backward(self, name, layer, batch):
        """Compute a backward pass and return the deliveries of its losses, the gradients of the inputs."""
        neurons = self.neurons(name, layer)
        if layer == self.layers - 1:
            messages = self.take(name, "outputs", layer, batch)
            results, _ = self.assemble(layer, batch, messages)
            loss, gradient = self.cross_entropy(results, batch)
            source = self.output_gradient_source(name, layer, batch, messages)
            if name == self.coordinator:
                self.losses.append(loss)
                self.observe(batch, loss, source)
            own_gradient = gradient[:, neurons] if source == "new" else None
        else:
            messages = self.take(name, "losses", layer + 1, batch)
            source = self.hidden_gradient_source(name, layer, batch, messages)
            own_gradient = None
            if messages:
                parts = [values[:, neurons] for values, *_ in messages.values()]
                own_gradient = sum(parts)
        input_gradient = self.learn(name, layer, batch, own_gradient, source)
        if input_gradient is None:
            return []
        return self.cast(name, "losses", layer, batch, input_gradient)

    def output_gradient_source(self, name, layer, batch, messages):
        """Return the gradient for an update of the output layer: "new" or "none"; VersatileFL adds "saved"."""
        # The output layer receives no losses, so the condition "all_losses" always holds.
        is_met = self.update_condition == "all_losses"
        is_met = is_met or len(messages) == len(self.holders(layer))
        return "new" if is_met and self.inputs_suffice(name, layer, batch) else "none"

    def hidden_gradient_source(self, name, layer, batch, messages):
        """Return the gradient for an update of another layer: "new" or "none"; VersatileFL adds "saved"."""
        is_met = len(messages) == len(self.holders(layer + 1))
        return "new" if is_met and self.inputs_suffice(name, layer, batch) else "none"

    def inputs_suffice(self, name, layer, batch):
        """Return whether the forward pass had the inputs that the update condition requires."""
        if self.update_condition != "all_transmissions":
            return True
        *_, missing = self.nodes[name].forwards[layer, batch]
        return not missing.any()

    def observe(self, step, loss, source):
        """Note the loss of a batch at the coordinator; EdgePipe does not use it."""

    def gradients(self, name, layer, batch, own_gradient):
        """Return the gradients of weights, bias and inputs, and the missing inputs, for the weights of the forward.

        ``own_gradient`` is the gradient of the outputs of the device's neurons.
        """
        inputs, weights, outputs, missing = self.nodes[name].forwards.pop(
            (layer, batch)
        )
        # The output layer has no ReLU.
        sums = own_gradient
        if layer < self.layers - 1:
            sums = own_gradient * (outputs > 0)
        return sums.T @ inputs, sums.sum(axis=0), sums @ weights, missing

    def update(self, node, layer, weight_gradient, bias_gradient):
        # In float32, as the run computes.
        rate = np.float32(self.setting.rate)
        node.weights[layer] = node.weights[layer] - rate * weight_gradient
        node.biases[layer] = node.biases[layer] - rate * bias_gradient

    def learn(self, name, layer, batch, own_gradient, source):
        """Update a layer, and return the gradient of its inputs for the layer before it, or None."""
        if source == "none":
            return None
        weight_gradient, bias_gradient, input_gradient, missing = self.gradients(
            name, layer, batch, own_gradient
        )
        self.update(self.nodes[name], layer, weight_gradient, bias_gradient)
        # Neurons whose outputs were missing have no part in the loss.
        input_gradient[:, missing] = 0
        return input_gradient if layer > 1 else None


class VersatileFLReference(EdgePipeReference):
    """VersatileFL, section IV: substitution, forward criterion, saved gradients and dynamic update.

    Without rearrangement, neurons stay on their devices.
    """

    def __init__(
        self,
        setting,
        granularity="link",
        ideal=False,
        thres_fw=None,
        forward_criterion="larger",
        grad_reuse_bw=None,
        patience=60,
        loss_window=1,
        substitute_past_outputs=False,
    ):
        super().__init__(setting)
        self.substitute_past_outputs = substitute_past_outputs
        self.granularity, self.ideal = granularity, ideal
        self.patience, self.loss_window = patience, loss_window
        self.thres_fw, self.grad_reuse_bw = thres_fw, grad_reuse_bw
        self.forward_criterion = forward_criterion
        self.windows = defaultdict(list)
        """Losses of unfinished windows, by the window's number."""
        self.best_loss, self.best_end = math.inf, None
        """The lowest mean loss of a window, and the step at which this window ended or the stage last advanced."""

    def message(self, node, kind, layer, batch, values):
        rates = node.rates.pop((layer, batch), ()) if kind == "outputs" else ()
        return values, rates, node.stage

    def cast(self, name, kind, layer, batch, values):
        exchanges_results = kind == "outputs" and layer == self.layers - 1
        if not (self.ideal and exchanges_results):
            return super().cast(name, kind, layer, batch, values)
        # With ideal result sharing, no exchanged result is lost.
        message = self.message(self.nodes[name], kind, layer, batch, values)
        key = kind, layer, batch
        return [(holder, key, name, message) for holder in self.holders(layer)]

    def take(self, name, kind, layer, batch):
        messages, node = super().take(name, kind, layer, batch), self.nodes[name]
        # Devices adopt the highest stage that a message carries.
        for _, _, stage in messages.values():
            node.stage = max(node.stage, stage)
        return messages

    def meets_criterion(self, name, layer, batch, rates):
        """Return whether a batch meets the forward criterion, here and in its forward pass."""
        node = self.nodes[name]
        threshold = self.thres_fw
        if threshold is None:
            # Rounded, since 0.1 * 3 exceeds 0.3 in binary.
            threshold = min(0.5, round(0.1 * node.stage, 9))
        # A mean of rates can exceed an equal threshold by a rounding error.
        if self.forward_criterion == "larger":
            threshold += 1e-9
        if any(rate < threshold for rate in rates):
            node.dropped.add((layer, batch))
        return (layer, batch) not in node.dropped

    def mean_rates(self, layer, messages):
        """Return the success rates into each layer up to ``layer``, as the mean over the received messages."""
        received = [rates for _, rates, _ in messages.values()]
        if not received:
            return [0.0] * layer
        return [
            sum(rates[index] for rates in received) / len(received)
            for index in range(layer)
        ]

    def continues(self, name, layer, batch, messages):
        own_rate = len(messages) / len(self.holders(layer - 1))
        rates = (*self.mean_rates(layer - 1, messages), own_rate)
        if not self.meets_criterion(name, layer, batch, rates):
            return False
        self.nodes[name].rates[layer, batch] = rates
        return True

    def substitute(self, node, layer, messages, inputs):
        """Replace missing outputs by the mean over samples of the sender's newest received outputs."""
        if not self.substitute_past_outputs:
            return
        for sender in self.holders(layer):
            if sender in messages:
                node.past[layer, sender] = messages[sender][0].mean(axis=0)
            elif (layer, sender) in node.past:
                inputs[:, self.neurons(sender, layer)] = node.past[layer, sender]

    def output_gradient_source(self, name, layer, batch, messages):
        rates = self.mean_rates(layer, messages)
        if not self.meets_criterion(name, layer, batch, rates):
            return "none"
        return "new" if len(messages) == len(self.holders(layer)) else "saved"

    def hidden_gradient_source(self, name, layer, batch, messages):
        if (layer, batch) in self.nodes[name].dropped:
            return "none"
        needed = 1
        if self.granularity == "neuron":
            needed = len(self.holders(layer + 1))
        return "new" if len(messages) >= needed else "saved"

    def observe(self, step, loss, source):
        """Add a loss to its window, and evaluate the windows that are complete."""
        if source != "new":
            return
        window = step // self.loss_window
        complete = [number for number in self.windows if number < window]
        self.windows[window].append(loss)
        if (step + 1) % self.loss_window == 0:
            complete.append(window)
        for number in complete:
            self.evaluate_window(number)

    def evaluate_window(self, number):
        """Advance the stage once the mean loss has not improved for ``patience`` steps."""
        losses, end = self.windows.pop(number), (number + 1) * self.loss_window
        mean = sum(losses) / len(losses)
        if self.best_end is None or mean < self.best_loss:
            self.best_loss, self.best_end = mean, end
        elif end - self.best_end >= self.patience:
            self.nodes[self.coordinator].stage += 1
            self.best_end = end

    def learn(self, name, layer, batch, own_gradient, source):
        node, input_gradient = self.nodes[name], None
        if source == "none":
            return None
        if own_gradient is not None:
            *gradients, input_gradient, _ = self.gradients(
                name, layer, batch, own_gradient
            )
            if source == "new":
                node.saved[layer], node.reuses[layer] = gradients, 0
                self.update(node, layer, *gradients)
        if source == "saved" and layer in node.saved:
            self.reuse_gradients(node, layer)
        return input_gradient if layer > 1 else None

    def reuse_gradients(self, node, layer):
        """Update with the saved gradients, at most grad_reuse_bw times; the default limit falls with the stage."""
        limit = self.grad_reuse_bw
        if limit is None:
            limit = max(0, 10 - node.stage)
        if node.reuses[layer] < limit:
            node.reuses[layer] += 1
            self.update(node, layer, *node.saved[layer])
