"""A reference for asynchronous pipelines: the undivided model, trained with delayed gradients by torch alone."""

import torch

from testbed.common.seeds import derive
from testbed.ml.data.batches import batch
from tests.helpers.runs import problem_of


def final_stretches(outcome):
    """Return the stretches of a run as (first batch, window, partition).

    A stretch is a series of batches under one partition. A recovery that resumes at an earlier batch undoes the
    stretches from that batch on, which are left out.
    """
    stretches = []
    for event in outcome.events.of("stretch"):
        fields = event.fields
        stretches = [stretch for stretch in stretches if stretch[0] < fields["step"]]
        stretches.append((fields["step"], fields["in_flight"], fields["partition"]))
    return stretches


def unit_of(parameter_name):
    """Return the unit of a parameter, whose name begins with the unit's number."""
    return int(parameter_name.split(".")[0])


class DelayedReference:
    """The undivided model with every version of its weights.

    Random numbers of layers, such as dropout, follow from the seed, the unit and the batch, as in the testbed.
    """

    def __init__(self, scenario, weights=None):
        self.problem, self.data = problem_of(scenario)
        units = len(self.problem.model.units)
        self.model = self.problem.model.build(0, units, self.problem.seed)
        if weights is not None:
            self.model.load_state_dict(weights)
        self.momentum = {}
        self.newest = {
            name: value.detach().clone()
            for name, value in self.model.named_parameters()
        }
        self.losses = []

    def gradients(self, step, weights):
        """Return the gradients of one batch for a version of the weights, and note the loss."""
        problem, data = self.problem, self.data
        chosen = batch(
            len(data.train_labels), problem.workload.batch_size, problem.seed, step
        )
        images = torch.from_numpy(data.train_images[chosen])
        labels = torch.from_numpy(data.train_labels[chosen])
        used = {name: value.clone().requires_grad_() for name, value in weights.items()}

        def seed_unit(name):
            seed = derive(problem.seed, "draws", name, repr((step, 0)))
            torch.default_generator.manual_seed(seed)

        outputs = torch.func.functional_call(self.model, used, (images, seed_unit))
        # The testbed sums over micro-batches before it divides, which rounds differently from a mean.
        total = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
        loss = total / len(labels)
        self.losses.append(float(loss.detach()))
        return dict(zip(used, torch.autograd.grad(loss, used.values()), strict=True))

    def train(self, first, last, spans, averaged=None):
        """Train on the batches from ``first`` until ``last``.

        ``spans`` maps each unit to its delay in updates plus one. ``averaged`` maps units to (interval, count): after
        each interval of updates, the newest ``count`` versions are replaced by their mean.
        """
        history = {first: self.newest}
        for step in range(first, last):
            used = {}
            for name in self.newest:
                # No batch uses a version older than the stretch: its pipeline starts empty.
                version = max(first, step - spans[unit_of(name)] + 1)
                used[name] = history[version][name]
            updated = self.update(self.gradients(step, used))
            self.newest = history[step + 1] = updated
            for name in updated:
                interval, count = (averaged or {}).get(unit_of(name), (0, 1))
                if count > 1 and (step + 1 - first) % interval == 0:
                    versions = [history[step + 1 - back][name] for back in range(count)]
                    updated[name] = torch.stack(versions).mean(0)
        return self

    def update(self, gradients):
        """Return the weights after a step of SGD with momentum, defined as in torch.optim.SGD."""
        optimizer = self.problem.workload.training.optimizer
        momentum, decay = optimizer.momentum or 0.0, optimizer.weight_decay or 0.0
        updated = {}
        for name, gradient in gradients.items():
            change = gradient.add(self.newest[name], alpha=decay)
            before = self.momentum.get(name)
            if before is not None:
                change = before.mul(momentum).add(change)
            self.momentum[name] = change
            updated[name] = self.newest[name].add(change, alpha=-optimizer.rate)
        return updated

    def replay(self, outcome, last, vertical_sync=True, aggregation_interval=0):
        """Train with all stretches of a run except the undone ones."""
        stretches = final_stretches(outcome)
        ends = [first for first, _, _ in stretches[1:]] + [last]
        for (first, window, partition), end in zip(stretches, ends, strict=True):
            spans, averaged = {}, {}
            for stage, (_, begin, stop) in enumerate(partition):
                # Stage s of n stores min(window, n - s) versions, as many as it has batches in flight.
                depth = min(window, len(partition) - stage)
                units = range(begin, stop)
                spans |= dict.fromkeys(units, window if vertical_sync else depth)
                if aggregation_interval:
                    interval = aggregation_interval * depth
                    averaged |= dict.fromkeys(units, (interval, depth))
            self.train(first, end, spans, averaged)
        return self
