"""What asynchronous training has to come to: delayed gradients on the undivided model, by torch alone."""

import torch

from testbed.common.seeds import derive
from testbed.ml.data.batches import batch
from tests.helpers.runs import problem_of


def final_stretches(outcome):
    """Return the stretches of a run that were not undone later, as (first batch, window, partition)."""
    kept = []
    for event in outcome.events.of("stretch"):
        fields = event.fields
        kept = [one for one in kept if one[0] < fields["step"]]
        kept.append((fields["step"], fields["in_flight"], fields["partition"]))
    return kept


class DelayedReference:
    """The undivided model, and every version of its weights; what it draws, it draws by seed, unit and batch."""

    def __init__(self, scenario, weights=None):
        self.problem, self.data = problem_of(scenario)
        self.model = self.problem.model.build(
            0, len(self.problem.model.units), self.problem.seed
        )
        if weights is not None:
            self.model.load_state_dict(weights)
        self.momentum = {}
        self.newest = {
            name: value.detach().clone()
            for name, value in self.model.named_parameters()
        }
        self.losses = []

    def gradients(self, step, weights):
        chosen = batch(
            len(self.data.train_labels),
            self.problem.workload.batch_size,
            self.problem.seed,
            step,
        )
        images, labels = (
            torch.from_numpy(part[chosen])
            for part in (self.data.train_images, self.data.train_labels)
        )
        used = {name: value.clone().requires_grad_() for name, value in weights.items()}

        def seeded(name):
            torch.default_generator.manual_seed(
                derive(self.problem.seed, "draws", name, repr((step, 0)))
            )

        outputs = torch.func.functional_call(self.model, used, (images, seeded))
        loss = torch.nn.functional.cross_entropy(
            outputs, labels, reduction="sum"
        ) / len(labels)
        self.losses.append(float(loss.detach()))
        return dict(zip(used, torch.autograd.grad(loss, used.values()), strict=True))

    def train(self, first, last, spans, averaged=None):
        """Train from one batch to another.

        ``spans`` gives each unit's delay plus one, ``averaged`` after how many updates how many of its versions become
        one.
        """
        optimizer = self.problem.workload.training.optimizer
        momentum, decay = optimizer.momentum or 0.0, optimizer.weight_decay or 0.0
        history = {first: self.newest}
        for step in range(first, last):
            used = {
                name: history[max(first, step - spans[int(name.split(".")[0])] + 1)][
                    name
                ]
                for name in self.newest
            }
            following = {}
            for name, gradient in self.gradients(step, used).items():
                change = gradient.add(self.newest[name], alpha=decay)
                before = self.momentum.get(name)
                self.momentum[name] = (
                    change if before is None else before.mul(momentum).add(change)
                )
                following[name] = self.newest[name].add(
                    self.momentum[name], alpha=-optimizer.rate
                )
            self.newest = history[step + 1] = following
            for name in following:
                every, count = (averaged or {}).get(int(name.split(".")[0]), (0, 1))
                if count > 1 and (step + 1 - first) % every == 0:
                    following[name] = torch.stack(
                        [history[step + 1 - back][name] for back in range(count)]
                    ).mean(0)
        return self

    def replay(self, outcome, last, vertical_sync=True, aggregation_interval=0):
        """Train as a run says that it did, leaving out what it undid."""
        found = final_stretches(outcome)
        for (first, window, partition), end in zip(
            found, [one[0] for one in found[1:]] + [last], strict=True
        ):
            spans, averaged = {}, {}
            for stage, (_, begin, stop) in enumerate(partition):
                depth = min(window, len(partition) - stage)
                spans |= dict.fromkeys(
                    range(begin, stop), window if vertical_sync else depth
                )
                averaged |= (
                    dict.fromkeys(
                        range(begin, stop), (aggregation_interval * depth, depth)
                    )
                    if aggregation_interval
                    else {}
                )
            self.train(first, end, spans, averaged)
        return self
