"""What is done about what is missing (Section IV), in the way in which `kits.slots.missing` says it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch

from testbed.device import Device
from testbed.kits.layers.layer_shard import LayerShard
from testbed.kits.slots.missing import Arrived, Confirm, Missing
from testbed.methods.versatile.forward import Rates, merged, valid
from testbed.methods.versatile.gradients import Saved, fresh, pass_on
from testbed.methods.versatile.knowledge import Knowledge
from testbed.methods.versatile.planner import VersatileOptions
from testbed.methods.versatile.thresholds import Stagnation, forward_threshold, reuse_limit


class Maintenance:
    """Substitution, the forward criterion and saved gradients of one device.

    Of the batches that are lost on the way here, nothing is learnt; of those whose losses are, saved gradients.
    """

    def __init__(self, options: VersatileOptions, knowledge: Knowledge) -> None:
        self._options = options
        self._knowledge = knowledge
        self._stagnation = Stagnation(options.patience)
        self._saved: defaultdict[int, Saved] = defaultdict(Saved)
        self._dropped: set[tuple[int, int]] = set()
        """Layers and numbers of the batches that went no further here."""
        self._fresh = self._lost = False
        """Of what is about to be learnt: whether of new gradients, whether of a batch that was dropped."""
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By layer, since `told`."""

    def missing(self, confirm: Confirm | None = None) -> Missing:
        """Return the policies."""
        says = self._options.rearrangement  # by which the others judge it
        learn, tests = self._learn, self._tests
        return Missing(self._inputs, self._results, self._losses, learn, tests, self._observe, confirm, says)

    def forget(self, layer: int) -> None:
        """Forget what was saved of a layer: its neurons are others now."""
        self._saved.pop(layer, None)

    def report(self, device: Device, step: int) -> None:
        """Record by layer what was counted since the last time: values due and missing, batches, updates."""
        for layer, counts in sorted(self._counts.items()):
            device.record("maintenance", step=step, layer=layer, **counts)
        self._counts.clear()

    def _tests(self, arrived: Arrived) -> torch.Tensor | None:
        return arrived.together() if self._options.substitution or arrived.complete else None

    def _inputs(self, arrived: Arrived) -> torch.Tensor | None:
        layer = arrived.layer + 1
        rates = (*_told(arrived, arrived.layer), arrived.rate)
        self._count(layer, arrived)
        if not self._goes_on(layer, arrived, rates):
            return None
        self._knowledge.rates[layer, arrived.batch] = rates
        return arrived.together()

    def _results(self, arrived: Arrived) -> torch.Tensor | None:
        """Return all results; those of a batch of which some are missing give no exact loss."""
        going = self._goes_on(arrived.layer, arrived, _told(arrived, arrived.layer))
        self._fresh, self._lost = going and arrived.complete and arrived.others, not going
        return arrived.together() if self._fresh else None

    def _goes_on(self, layer: int, arrived: Arrived, rates: Rates) -> bool:
        """Return whether a batch goes on to be learnt from, and keep in mind where it does not."""
        key = (layer, arrived.batch)
        threshold = self._options.thres_fw
        least = forward_threshold(self._knowledge.stage) if threshold is None else threshold
        going = valid(rates, least) and (self._options.substitution or arrived.complete)
        self._counts[layer]["batches"] += 1
        if key in self._dropped or going:
            return going and key not in self._dropped
        self._dropped.add(key)
        self._counts[layer]["dropped"] += 1
        return False

    def _losses(self, arrived: Arrived) -> torch.Tensor | None:
        layer = arrived.layer - 1
        key = (layer, arrived.batch)
        self._lost = key in self._dropped
        self._dropped -= {each for each in self._dropped if each[0] == layer and each[1] <= arrived.batch}
        here = sum(part.tensor is not None for part in arrived.parts)
        self._fresh = fresh(self._options.backward, here, len(arrived.parts), others=arrived.others)
        if not here or (not self._options.substitution and not arrived.complete):
            return None
        return arrived.added()

    def _learn(
        self, shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor | None
    ) -> Callable[[], torch.Tensor | None] | None:
        saved, counts = self._saved[layer], self._counts[layer]
        if self._lost:
            return None
        if gradient is not None and self._fresh:
            counts["fresh"] += 1
            return partial(saved.learn, shard, layer, batch, gradient)
        limit = self._options.grad_reuse
        most = reuse_limit(self._knowledge.stage) if limit is None else limit
        reuses = self._options.reuse and saved.usable(most)
        counts["reused" if reuses else "idle"] += 1
        if gradient is None and not reuses:
            return None

        def work() -> torch.Tensor | None:
            before = None if gradient is None else pass_on(shard, layer, batch, gradient)
            if reuses:
                saved.reuse(shard)
            return before

        return work

    def _observe(self, step: int, loss: float) -> None:
        """Take the loss of a step whose results are complete, on the device that leads."""
        self._knowledge.stage = max(self._knowledge.stage, self._stagnation.observe(step, loss))

    def _count(self, layer: int, arrived: Arrived) -> None:
        for part in arrived.parts:
            self._counts[layer]["due"] += len(part.neurons)
            self._counts[layer]["missing"] += len(part.neurons) * (part.tensor is None)


def _told(arrived: Arrived, layers: int) -> Rates:
    """Return the rates into this many layers, as the devices tell whose values have arrived."""
    notes = [part.note or {} for part in arrived.parts if part.tensor is not None]
    return merged([tuple(note["rates"]) for note in notes], layers)
