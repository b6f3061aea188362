"""A device that holds layers: loads them, computes steps in the order of their arrival, and keeps KV caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from testbed.device import Cost, Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed_generation.costs import CostModel
from testbed_generation.disk import Disk
from testbed_generation.messages import (
    Assign,
    Assigned,
    Copy,
    Ping,
    Pong,
    Release,
    Result,
    Step,
)
from testbed_generation.network import Cache, LayerShard, score
from testbed_generation.sampling import Sampling
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, Source, read_layer


@dataclass
class Sequence:
    """The KV caches of one request on one stage."""

    attempt: int
    position: int = 0
    """Tokens in the caches."""
    caches: list[Cache] = field(default_factory=list)


class LayerRange:
    """Layers ``first`` up to but without ``last`` with the caches of all requests; without weights only time passes."""

    def __init__(self, model: CostModel, assign: Assign, source: Source | None) -> None:
        """Read the weights from ``source``; None: without numerics."""
        self.assign = assign
        self.model = model
        self.sequences: dict[int, Sequence] = {}
        self._layers: list[LayerShard] = []
        self._output: Tensor | None = None
        self._norm: Tensor | None = None
        if source is None:
            return
        architecture = model.architecture
        for layer in range(assign.first, assign.last):
            self._layers.append(
                LayerShard(architecture, read_layer(source, architecture, layer))
            )
        if assign.final:
            self._output = source.read(EMBEDDING if architecture.tied else OUTPUT)
            self._norm = source.read(NORM)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.assign.last - self.assign.first

    def accepts(self, step: Step) -> bool:
        """Return whether a step continues the caches; a newer attempt drops entries from its position on.

        A step of an older attempt, one that was computed already, and one with a gap before it do not.
        """
        sequence = self.sequences.setdefault(
            step.request, self._empty_sequence(step.attempt)
        )
        if step.attempt < sequence.attempt or step.position > sequence.position:
            return False
        if step.attempt == sequence.attempt:
            # A lower position is a repetition, a higher one follows a step that was lost.
            return step.position == sequence.position
        sequence.attempt = step.attempt
        sequence.position = step.position
        for cache in sequence.caches:
            cache.truncate(step.position)
        return True

    def _empty_sequence(self, attempt: int) -> Sequence:
        return Sequence(attempt, caches=[Cache() for _ in self._layers])

    def step_cost(self, step: Step) -> Cost:
        """Return the cost of a step; the output matrix is applied to the last token only."""
        cost = self.model.layers_cost(self.layer_count, step.tokens, step.position)
        # Logits after the earlier tokens of a prompt are not needed.
        return cost + self.model.output_cost(step.scored) if self.assign.final else cost

    def compute_step(self, step: Step) -> Tensor | None:
        """Return the values after the layers, or the logits after the last tokens from the final stage."""
        sequence = self.sequences[step.request]
        sequence.position = step.position + step.tokens
        if step.values is None:
            return None
        values = step.values
        with torch.inference_mode():
            for layer, cache in zip(self._layers, sequence.caches, strict=True):
                values = layer.forward(values, cache)
            if self._output is None or self._norm is None:
                return values
            return score(
                values[-step.scored :],
                self._norm,
                self._output,
                self.model.architecture.epsilon,
            )

    def added_entries(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a step's tokens, each of shape (layers, heads, tokens, values of a head)."""
        caches = self.sequences[step.request].caches
        if step.values is None or not caches:
            return None
        keys = []
        values = []
        for cache in caches:
            assert cache.keys is not None
            assert cache.values is not None
            keys.append(cache.keys[:, step.position :])
            values.append(cache.values[:, step.position :])
        return torch.stack(keys), torch.stack(values)

    def adopt_copies(self, copies: list[Copy]) -> None:
        """Fill the caches of a request from copies in the order of positions, up to the first gap."""
        # Copies of a later attempt replace those of rejected drafts and of texts that began anew.
        for copy in sorted(copies, key=lambda copy: (copy.attempt, copy.position)):
            sequence = self.sequences.setdefault(
                copy.request, self._empty_sequence(copy.attempt)
            )
            if copy.position > sequence.position:
                return
            sequence.attempt = copy.attempt
            sequence.position = copy.position + copy.tokens
            if copy.keys is None or copy.values is None:
                continue
            for cache, keys, values in zip(
                sequence.caches, copy.keys, copy.values, strict=True
            ):
                cache.truncate(copy.position)
                cache.extend(keys, values)


class Holder:
    """The program of a device: holds assigned layers and answers pings."""

    def __init__(
        self,
        mailbox: Mailbox,
        source: str,
        model: CostModel,
        sampling: Sampling,
        weights: Callable[[Assign], Source | None],
        load_seconds: Callable[[Assign], float],
        disk: Disk | None = None,
    ) -> None:
        """Open weights by ``weights``, None without numerics; reading takes ``load_seconds``.

        With a ``disk``, layers beyond the memory are read from it for each step.
        """
        self.ranges: dict[int, LayerRange] = {}
        self._mailbox = mailbox
        self._device: Device = mailbox.device
        self._source = source
        self._model = model
        self._sampling = sampling
        self._weights = weights
        self._load_seconds = load_seconds
        self._disk = disk
        self._copies: dict[tuple[int, int], list[Copy]] = {}
        """Copies of others' caches by first layer and request."""
        self._oldest = 0
        """Lowest number of a valid assignment."""
        self._incarnation = self._device.now()
        mailbox.on(Ping, self._answer_ping)
        mailbox.on(Copy, self._keep_copy)
        mailbox.on(Release, self._release_request)
        mailbox.on(Assign, self._start_loading)

    async def serve_steps(self) -> None:
        """Compute steps in the order of arrival, until cancelled."""
        while True:
            step = await self._mailbox.take(Step)
            held = self.ranges.get(step.assignment)
            # A device that has restarted does not know its assignments any more: the source will notice.
            if held is not None and held.accepts(step):
                await self._compute_step(held, step)

    def _answer_ping(self, ping: Ping) -> None:
        self._mailbox.post(ping.sender, Pong(ping.question, self._incarnation))

    def _keep_copy(self, copy: Copy) -> None:
        self._copies.setdefault((copy.first, copy.request), []).append(copy)

    def _release_request(self, release: Release) -> None:
        for held in self.ranges.values():
            held.sequences.pop(release.request, None)
        for key in list(self._copies):
            if key[1] == release.request:
                del self._copies[key]

    def _start_loading(self, assign: Assign) -> None:
        if assign.oldest is not None:
            self._drop_before(assign.oldest)
        self._mailbox.start(self._load_layers(assign))

    def _drop_before(self, oldest: int) -> None:
        """Drop the ranges of void assignments, whose weights would take memory until the end of the run."""
        self._oldest = oldest
        for number in [number for number in self.ranges if number < oldest]:
            dropped = self.ranges.pop(number)
            if self._disk is not None:
                self._disk.drop(dropped.assign.first)

    async def _load_layers(self, assign: Assign) -> None:
        await self._device.sleep(self._load_seconds(assign))
        if assign.assignment < self._oldest:
            # Void since another device was lost while this one loaded.
            return
        held = LayerRange(self._model, assign, self._weights(assign))
        for (first, _), copies in self._copies.items():
            if first == assign.first:
                held.adopt_copies(copies)
        self.ranges[assign.assignment] = held
        if self._disk is not None:
            self._disk.hold(assign.first, held.layer_count)
        positions = {
            str(request): sequence.position
            for request, sequence in held.sequences.items()
        }
        self._mailbox.post(self._source, Assigned(assign.assignment, positions))

    async def _compute_step(self, held: LayerRange, step: Step) -> None:
        name = "prefill" if step.tokens > 1 else "decode"
        span = Span(name, batch=step.request, micro=step.position + step.tokens - 1)
        if self._disk is not None:
            await self._disk.fetch(held.assign.first)
        values = await self._device.compute(
            lambda: held.compute_step(step), held.step_cost(step), span
        )
        if self._disk is not None:
            self._disk.read_ahead(held.assign.first)
        if held.assign.replica is not None:
            # Before the values, so that copies of a token are under way when the source learns of the token.
            self._send_copy(held, step, held.assign.replica)
        end = step.position + step.tokens
        if step.way:
            (following, assignment), *way = step.way
            padding = (
                0 if values is not None else self._model.message_bytes(step.tokens)
            )
            later = replace(
                step, assignment=assignment, way=way, values=values, padding=padding
            )
            self._mailbox.post(following, later)
            return
        chosen: list[int] = []
        padding = 0
        if held.assign.final:
            chosen = self._choose_tokens(step, values)
            values = None
        elif values is None:
            padding = self._model.message_bytes(step.tokens)
        result = Result(
            step.request,
            step.attempt,
            end,
            step.assignment,
            chosen,
            values,
            padding=padding,
        )
        self._mailbox.post(self._source, result)

    def _choose_tokens(self, step: Step, logits: Tensor | None) -> list[int]:
        """Return the tokens after the last ones of a step; without numerics any token stands for all."""
        if logits is None:
            return [0] * step.scored
        chosen = []
        first = step.position + step.tokens - step.scored + 1
        for place in range(step.scored):
            token = self._sampling.choose_token(
                logits[place], step.request, first + place
            )
            chosen.append(token)
        return chosen

    def _send_copy(self, held: LayerRange, step: Step, neighbour: str) -> None:
        added = held.added_entries(step)
        size = (
            self._model.architecture.cache_bytes(self._model.cache_value_bytes)
            * held.layer_count
            * step.tokens
        )
        keys, values = added if added is not None else (None, None)
        copy = Copy(
            held.assign.first,
            step.request,
            step.attempt,
            step.position,
            step.tokens,
            keys,
            values,
            padding=0 if added is not None else size,
        )
        self._mailbox.post(neighbour, copy)
