"""EdgePipe and VersatileFL, written again from their papers in numpy, for the casts that were received in a run.

Nothing of the methods or their kit is imported. Groups are of equal length, as the papers have them, and neurons stay
where they are. Layers count from 0, the input layer, and batches from 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np


@dataclass
class RunSetting:
    """What a run is made of."""

    groups: list[list[str]]
    """Devices by group; all groups have as many layers."""
    weights: list[tuple[np.ndarray, np.ndarray]]
    """Of layer 1 on: (outputs, inputs) and (outputs,)."""
    batches: list[tuple[np.ndarray, np.ndarray]]
    """Samples, (samples, values), and labels."""
    rate: float
    received: set[tuple[str, str, int]]
    """Sender, receiver, number of the sender's cast."""


@dataclass
class ReferenceDevice:
    """One device."""

    weights: dict[int, np.ndarray]
    biases: dict[int, np.ndarray]
    inbox: defaultdict = field(default_factory=lambda: defaultdict(dict))
    """By kind, layer and batch: what came, by sender."""
    kept: dict = field(default_factory=dict)
    """Of forwards: inputs, weights, outputs, and which inputs had not come."""
    casts: int = 0
    stage: int = 0
    dropped: set = field(default_factory=set)
    saved: dict = field(default_factory=dict)
    used: Counter = field(default_factory=Counter)
    rates: dict = field(default_factory=dict)
    past: dict = field(default_factory=dict)


class EdgePipeReference:
    """Section V: one pass of a layer a timeslot; what has not come is treated as null."""

    def __init__(self, setting, update_condition="all_losses"):
        self.setting, self.update_condition = setting, update_condition
        self.sizes = [
            setting.batches[0][0].shape[1],
            *(len(bias) for _, bias in setting.weights),
        ]
        self.layers = len(self.sizes)
        self.most = self.layers // len(setting.groups)  # M_layers
        self.period = 2 * self.most if len(setting.groups) > 1 else 2 * self.layers - 1
        self.nodes, self.losses = {}, []
        for group, names in enumerate(setting.groups):
            for name in names:
                held = [
                    layer
                    for layer in range(group * self.most, (group + 1) * self.most)
                    if layer
                ]
                rows = {layer: self.neurons(name, layer) for layer in held}
                self.nodes[name] = ReferenceDevice(
                    {
                        layer: setting.weights[layer - 1][0][rows[layer]].copy()
                        for layer in held
                    },
                    {
                        layer: setting.weights[layer - 1][1][rows[layer]].copy()
                        for layer in held
                    },
                )

    def holders(self, layer):
        return self.setting.groups[layer // self.most]

    def neurons(self, name, layer):
        names = self.holders(layer)
        place = names.index(name)
        return slice(
            self.sizes[layer] * place // len(names),
            self.sizes[layer] * (place + 1) // len(names),
        )

    @property
    def coordinator(self):
        return self.setting.groups[-1][0]

    def train(self):
        """Go through all timeslots; what is cast in one can be used in the next."""
        count = len(self.setting.batches)
        for slot in range(2 * self.layers - 1 + self.period * (count - 1)):
            sent = []
            for layer in range(self.layers):
                for first, work in (
                    (layer, self.forward),
                    (2 * self.layers - 1 - layer, self.backward),
                ):
                    batch, rest = divmod(slot - first, self.period)
                    if (
                        rest == 0
                        and 0 <= batch < count
                        and (layer or work == self.forward)
                    ):
                        for name in self.holders(layer):
                            sent += work(name, layer, batch)
            for target, key, sender, message in sent:
                self.nodes[target].inbox[key][sender] = message
        return self

    def cast(self, name, kind, layer, batch, values):
        """Return who receives a cast, as it goes into inboxes after the slot."""
        target = min(layer + 1, self.layers - 1) if kind == "outputs" else layer - 1
        node, others = (
            self.nodes[name],
            [each for each in self.holders(target) if each != name],
        )
        message = self.message(node, kind, layer, batch, values)
        heard = [name] if name in self.holders(target) else []
        if others:
            heard += [
                each
                for each in others
                if (name, each, node.casts) in self.setting.received
            ]
            node.casts += 1
        return [(each, (kind, layer, batch), name, message) for each in heard]

    def message(self, node, kind, layer, batch, values):
        return values, (), node.stage

    def take(self, name, kind, layer, batch):
        """Return what has come of a layer, by sender."""
        return self.nodes[name].inbox.pop((kind, layer, batch), {})

    def whole(self, layer, batch, came):
        """Return the outputs of a layer with zeros for those that have not come, and which have not."""
        found = np.zeros(
            (len(self.setting.batches[batch][0]), self.sizes[layer]), np.float32
        )
        gaps = np.ones(self.sizes[layer], bool)
        for sender, (values, *_) in came.items():
            found[:, self.neurons(sender, layer)], gaps[self.neurons(sender, layer)] = (
                values,
                False,
            )
        return found, gaps

    def forward(self, name, layer, batch):
        if layer == 0:
            images = self.setting.batches[batch][0]
            return self.cast(
                name, "outputs", 0, batch, images[:, self.neurons(name, 0)]
            )
        came = self.take(name, "outputs", layer - 1, batch)
        if not self.goes_on(name, layer, batch, came):
            return []
        node, (inputs, gaps) = self.nodes[name], self.whole(layer - 1, batch, came)
        self.substitute(node, layer - 1, came, inputs)
        outputs = inputs @ node.weights[layer].T + node.biases[layer]
        if layer < self.layers - 1:
            outputs = np.maximum(outputs, 0)
        node.kept[layer, batch] = inputs, node.weights[layer].copy(), outputs, gaps
        return self.cast(name, "outputs", layer, batch, outputs)

    def goes_on(self, name, layer, batch, came):
        return True

    def substitute(self, node, layer, came, inputs):
        pass

    def cross_entropy(self, results, batch):
        """Return the mean loss and its gradient by the results."""
        labels = self.setting.batches[batch][1]
        shifted = results - results.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        gradient = np.exp(logs)
        gradient[rows, labels] -= 1
        return float(-logs[rows, labels].mean()), gradient / len(labels)

    def backward(self, name, layer, batch):
        if layer == self.layers - 1:
            came = self.take(name, "outputs", layer, batch)
            results, _ = self.whole(layer, batch, came)
            loss, gradient = self.cross_entropy(results, batch)
            own, learns = (
                gradient[:, self.neurons(name, layer)],
                self.of_results(name, layer, batch, came),
            )
            if name == self.coordinator:
                self.losses.append(loss)
                self.observe(batch, loss, learns)
            own = own if learns == "new" else None
        else:
            came = self.take(name, "losses", layer + 1, batch)
            learns = self.of_losses(name, layer, batch, came)
            own = (
                sum(
                    values[:, self.neurons(name, layer)] for values, *_ in came.values()
                )
                if came
                else None
            )
        before = self.learn(name, layer, batch, own, learns)
        return [] if before is None else self.cast(name, "losses", layer, batch, before)

    def of_results(self, name, layer, batch, came):
        due = self.update_condition == "all_losses" or len(came) == len(
            self.holders(layer)
        )
        return "new" if due and self.inputs_suffice(name, layer, batch) else "nothing"

    def of_losses(self, name, layer, batch, came):
        due = len(came) == len(self.holders(layer + 1))
        return "new" if due and self.inputs_suffice(name, layer, batch) else "nothing"

    def inputs_suffice(self, name, layer, batch):
        return (
            self.update_condition != "all_transmissions"
            or not self.nodes[name].kept[layer, batch][-1].any()
        )

    def observe(self, step, loss, learns):
        pass

    def gradients(self, name, layer, batch, own):
        """Return the gradients of the weights that the forward was made with, of the bias, and of the inputs."""
        inputs, weights, outputs, gaps = self.nodes[name].kept.pop((layer, batch))
        sums = own if layer == self.layers - 1 else own * (outputs > 0)
        return sums.T @ inputs, sums.sum(axis=0), sums @ weights, gaps

    def update(self, node, layer, by_weights, by_bias):
        node.weights[layer] = (
            node.weights[layer] - np.float32(self.setting.rate) * by_weights
        )
        node.biases[layer] = (
            node.biases[layer] - np.float32(self.setting.rate) * by_bias
        )

    def learn(self, name, layer, batch, own, learns):
        if learns == "nothing":
            return None
        by_weights, by_bias, before, gaps = self.gradients(name, layer, batch, own)
        self.update(self.nodes[name], layer, by_weights, by_bias)
        before[:, gaps] = 0
        return before if layer > 1 else None


class VersatileFLReference(EdgePipeReference):
    """Section IV: substitution, the forward criterion, saved gradients, dynamic update; neurons stay where they are."""

    def __init__(
        self,
        setting,
        granularity="link",
        ideal=False,
        thres_fw=None,
        grad_reuse_bw=None,
        patience=60,
        loss_window=1,
        substitute_past_outputs=False,
    ):
        super().__init__(setting)
        self.substitute_past_outputs = substitute_past_outputs
        self.granularity, self.ideal, self.patience, self.loss_window = (
            granularity,
            ideal,
            patience,
            loss_window,
        )
        self.seen = defaultdict(list)
        self.given = thres_fw, grad_reuse_bw
        self.best, self.since = math.inf, None

    def message(self, node, kind, layer, batch, values):
        return (
            values,
            node.rates.pop((layer, batch), ()) if kind == "outputs" else (),
            node.stage,
        )

    def cast(self, name, kind, layer, batch, values):
        if not (self.ideal and kind == "outputs" and layer == self.layers - 1):
            return super().cast(name, kind, layer, batch, values)
        message = self.message(self.nodes[name], kind, layer, batch, values)
        return [
            (each, (kind, layer, batch), name, message) for each in self.holders(layer)
        ]

    def take(self, name, kind, layer, batch):
        came, node = super().take(name, kind, layer, batch), self.nodes[name]
        node.stage = max([node.stage, *(stage for _, _, stage in came.values())])
        return came

    def criterion(self, name, layer, batch, rates):
        """Return whether a batch meets thres_fw here, and did so before."""
        node = self.nodes[name]
        threshold = (
            min(0.5, round(0.1 * node.stage, 9))
            if self.given[0] is None
            else self.given[0]
        )
        if any(rate < threshold for rate in rates):
            node.dropped.add((layer, batch))
        return (layer, batch) not in node.dropped

    def rates_of(self, layer, came):
        """Return the success rates into all layers up to one: the mean of those that came from it."""
        heard = [rates for _, rates, _ in came.values()]
        return [
            sum(rates[at] for rates in heard) / len(heard) if heard else 0.0
            for at in range(layer)
        ]

    def goes_on(self, name, layer, batch, came):
        rates = (
            *self.rates_of(layer - 1, came),
            len(came) / len(self.holders(layer - 1)),
        )
        if not self.criterion(name, layer, batch, rates):
            return False
        self.nodes[name].rates[layer, batch] = rates
        return True

    def substitute(self, node, layer, came, inputs):
        """Put the mean of what a sender's neurons last gave in the place of zeros."""
        for sender in self.holders(layer) if self.substitute_past_outputs else ():
            if sender in came:
                node.past[layer, sender] = came[sender][0].mean(axis=0)
            elif (layer, sender) in node.past:
                inputs[:, self.neurons(sender, layer)] = node.past[layer, sender]

    def of_results(self, name, layer, batch, came):
        if not self.criterion(name, layer, batch, self.rates_of(layer, came)):
            return "nothing"
        return "new" if len(came) == len(self.holders(layer)) else "saved"

    def of_losses(self, name, layer, batch, came):
        if (layer, batch) in self.nodes[name].dropped:
            return "nothing"
        due = len(self.holders(layer + 1)) if self.granularity == "neuron" else 1
        return "new" if len(came) >= due else "saved"

    def observe(self, step, loss, learns):
        """Compare mean losses of windows as these are over, or as a later one begins."""
        if learns != "new":
            return
        window = step // self.loss_window
        over = [each for each in self.seen if each < window]
        self.seen[window].append(loss)
        for each in over + ([window] if (step + 1) % self.loss_window == 0 else []):
            losses, end = self.seen.pop(each), (each + 1) * self.loss_window
            mean = sum(losses) / len(losses)
            if self.since is None or mean < self.best:
                self.best, self.since = mean, end
            elif end - self.since >= self.patience:
                self.nodes[self.coordinator].stage += 1
                self.since = end

    def learn(self, name, layer, batch, own, learns):
        node, before = self.nodes[name], None
        if learns == "nothing":
            return None
        if own is not None:
            *gradients, before, _ = self.gradients(name, layer, batch, own)
            if learns == "new":
                node.saved[layer], node.used[layer] = gradients, 0
                self.update(node, layer, *gradients)
        if learns == "saved" and layer in node.saved:
            limit = max(0, 10 - node.stage) if self.given[1] is None else self.given[1]
            if node.used[layer] < limit:
                node.used[layer] += 1
                self.update(node, layer, *node.saved[layer])
        return before if layer > 1 else None
