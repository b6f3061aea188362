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
    """Attempt of the last step, see `testbed_generation.messages.Step`."""
    position: int = 0
    """Number of tokens in the caches; also counted without numerics, where there are no caches."""
    caches: list[Cache] = field(default_factory=list)


class LayerRange:
    """The layers of one assignment, with the KV caches of all requests.

    Without weights no values are computed; positions in the caches are counted, since times depend on them.
    """

    def __init__(self, model: CostModel, assign: Assign, source: Source | None) -> None:
        """``source`` has the weights; None without numerics."""
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
            weights = read_layer(source, architecture, layer)
            self._layers.append(LayerShard(architecture, weights))
        if assign.final:
            self._output = source.read(EMBEDDING if architecture.tied else OUTPUT)
            self._norm = source.read(NORM)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.assign.last - self.assign.first

    def accepts(self, step: Step) -> bool:
        """Return whether a step continues the caches; a newer attempt drops entries from its position on.

        Refused are a step of an older attempt, one that was computed already, and one with a gap before it.
        """
        empty = self._empty_sequence(step.attempt)
        sequence = self.sequences.setdefault(step.request, empty)
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
        """Return the cost of a step; the output matrix is applied to its last ``scored`` tokens only."""
        cost = self.model.layers_cost(self.layer_count, step.tokens, step.position)
        if not self.assign.final:
            return cost
        # Logits after the earlier tokens of a prompt are not needed.
        return cost + self.model.output_cost(step.scored)

    def compute_step(self, step: Step) -> Tensor | None:
        """Return the values after the layers, (tokens, width), or from the final stage logits, (scored, vocabulary)."""
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
            last_values = values[-step.scored :]
            epsilon = self.model.architecture.epsilon
            return score(last_values, self._norm, self._output, epsilon)

    def added_entries(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a step's tokens, each of shape (layers, heads, tokens, values of a head).

        None without numerics, and for a stage without layers.
        """
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
            empty = self._empty_sequence(copy.attempt)
            sequence = self.sequences.setdefault(copy.request, empty)
            if copy.position > sequence.position:
                # The copy before this one is still on its way, or was lost with its sender.
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
    """The program of a device with layers: loads assigned layers, computes steps, keeps copies and answers pings."""

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
        """``source`` is the device that assigns layers and receives results.

        ``weights`` returns the weights for an assignment, None without numerics; ``load_seconds`` returns the time to
        load its layers. Layers beyond the memory are read from the ``disk`` for each step.
        """
        self.ranges: dict[int, LayerRange] = {}
        """Loaded layers by number of the assignment; several while one replaces another."""
        self._mailbox = mailbox
        self._device: Device = mailbox.device
        self._source = source
        self._model = model
        self._sampling = sampling
        self._weights = weights
        self._load_seconds = load_seconds
        self._disk = disk
        self._copies: dict[tuple[int, int], list[Copy]] = {}
        """Copies of another stage's caches, by first layer of the stage and request."""
        self._oldest = 0
        """Lowest number of a valid assignment."""
        # After a restart the program starts later, by which the source notices that the layers are gone.
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
            # A device that has restarted does not know its assignments any more; the source notices by the next pong.
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
        void = [number for number in self.ranges if number < oldest]
        for number in void:
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
        positions = {}
        for request, sequence in held.sequences.items():
            # Keys of JSON are strings.
            positions[str(request)] = sequence.position
        self._mailbox.post(self._source, Assigned(assign.assignment, positions))

    async def _compute_step(self, held: LayerRange, step: Step) -> None:
        """Compute a step, and send copies of its cache entries and its result."""
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
        if step.way:
            self._forward_values(step, values)
        else:
            self._send_result(held, step, values)

    def _forward_values(self, step: Step, values: Tensor | None) -> None:
        """Send values to the next stage on a step's way."""
        (following, assignment), *way = step.way
        later = replace(
            step,
            assignment=assignment,
            way=way,
            values=values,
            padding=self._padding_for(values, step.tokens),
        )
        self._mailbox.post(following, later)

    def _send_result(self, held: LayerRange, step: Step, values: Tensor | None) -> None:
        """Send the source the tokens chosen by the final stage, or the values of any other stage."""
        chosen: list[int] = []
        padding = 0
        if held.assign.final:
            chosen = self._choose_tokens(step, values)
            # The source needs the chosen tokens only, and they take a few bytes.
            values = None
        else:
            padding = self._padding_for(values, step.tokens)
        result = Result(
            step.request,
            step.attempt,
            computed=step.position + step.tokens,
            assignment=step.assignment,
            chosen=chosen,
            values=values,
            padding=padding,
        )
        self._mailbox.post(self._source, result)

    def _padding_for(self, values: Tensor | None, tokens: int) -> int:
        """Return the bytes that stand for values without numerics, so that links take the same time."""
        return 0 if values is not None else self._model.message_bytes(tokens)

    def _choose_tokens(self, step: Step, logits: Tensor | None) -> list[int]:
        """Return the token after each of the last ``scored`` tokens of a step; without numerics always token 0."""
        if logits is None:
            return [0] * step.scored
        chosen = []
        # Position in the text of the first chosen token; draws depend on the position.
        first = step.position + step.tokens - step.scored + 1
        for place in range(step.scored):
            position = first + place
            token = self._sampling.choose_token(logits[place], step.request, position)
            chosen.append(token)
        return chosen

    def _send_copy(self, held: LayerRange, step: Step, neighbour: str) -> None:
        """Send the cache entries of a step to the device that would replace this one."""
        added = held.added_entries(step)
        keys, values = added if added is not None else (None, None)
        padding = 0
        if added is None:
            model = self._model
            # Bytes of one token in the cache of one layer.
            entry = model.architecture.cache_bytes(model.cache_value_bytes)
            padding = entry * held.layer_count * step.tokens
        copy = Copy(
            held.assign.first,
            step.request,
            step.attempt,
            step.position,
            step.tokens,
            keys,
            values,
            padding=padding,
        )
        self._mailbox.post(neighbour, copy)
