"""The program of a device with layers: loads them, computes steps in the order of arrival, and keeps KV caches.

A `StageServer` may hold several `LayerRange` objects, one for each assignment of the coordinator. The final stage has
the output matrix and chooses tokens. With recovery by replication, a stage sends copies of new cache entries to the
device that would replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

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
from testbed_generation.sampling import Sampling
from testbed_generation.transformer import Cache, LayerShard, score
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, WeightSource, read_layer


@dataclass
class SequenceState:
    """The KV caches of one request on one stage."""

    attempt: int
    """Attempt of the last step; attempts rise when the coordinator sends tokens of a request again."""
    position: int = 0
    """Number of tokens in the caches; without numerics there are no caches, but tokens are counted as well."""
    caches: list[Cache] = field(default_factory=list)


class LayerRange:
    """The layers of one assignment, with the KV caches of all requests.

    Without numerics there are no weights and no activations; positions in the caches are counted, since times depend on
    them.
    """

    def __init__(
        self, model: CostModel, assign: Assign, weight_source: WeightSource | None
    ) -> None:
        """Read the weights of the layers named by ``assign``; ``weight_source`` is None without numerics."""
        self.assign = assign
        self.model = model
        self.sequences: dict[int, SequenceState] = {}
        self._layers: list[LayerShard] = []
        self._output: Tensor | None = None
        self._norm: Tensor | None = None
        if weight_source is None:
            return
        architecture = model.architecture
        for layer in range(assign.first, assign.last):
            weights = read_layer(weight_source, architecture, layer)
            self._layers.append(LayerShard(architecture, weights))
        if assign.final:
            output = EMBEDDING if architecture.tied else OUTPUT
            self._output = weight_source.read(output)
            self._norm = weight_source.read(NORM)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.assign.last - self.assign.first

    def accepts(self, step: Step) -> bool:
        """Return whether a step continues the caches, which are first truncated for a step of a newer attempt.

        A step is rejected if its attempt is older, if it was computed already, or if earlier tokens are missing.
        """
        new_sequence = self._make_sequence(step.attempt)
        sequence = self.sequences.setdefault(step.request, new_sequence)
        if step.attempt < sequence.attempt or step.position > sequence.position:
            return False
        if step.attempt == sequence.attempt:
            # A lower position shows a repeated step, a higher position a lost step before this one.
            return step.position == sequence.position
        sequence.attempt = step.attempt
        sequence.position = step.position
        for cache in sequence.caches:
            cache.truncate(step.position)
        return True

    def _make_sequence(self, attempt: int) -> SequenceState:
        return SequenceState(attempt, caches=[Cache() for _ in self._layers])

    def step_cost(self, step: Step) -> Cost:
        """Return the cost of a step; the output matrix is applied to the last ``scored`` tokens only."""
        cost = self.model.layers_cost(self.layer_count, step.tokens, step.position)
        if not self.assign.final:
            return cost
        # Logits after earlier tokens are not needed: the tokens that follow them are known.
        return cost + self.model.output_cost(step.scored)

    def compute_step(self, step: Step) -> Tensor | None:
        """Return the output for a step: logits, (scored, vocabulary), of the final stage, else activations.

        Activations have the shape (tokens, width). The result is None without numerics.
        """
        sequence = self.sequences[step.request]
        sequence.position = step.position + step.tokens
        if step.values is None:
            return None
        activations = step.values
        with torch.inference_mode():
            for layer, cache in zip(self._layers, sequence.caches, strict=True):
                activations = layer.forward(activations, cache)
            if self._output is None or self._norm is None:
                return activations
            scored_activations = activations[-step.scored :]
            epsilon = self.model.architecture.epsilon
            return score(scored_activations, self._norm, self._output, epsilon)

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
            # The step has been computed, so each cache has the entries of its tokens.
            assert cache.keys is not None
            assert cache.values is not None
            keys.append(cache.keys[:, step.position :])
            values.append(cache.values[:, step.position :])
        return torch.stack(keys), torch.stack(values)

    def adopt_copies(self, copies: list[Copy]) -> None:
        """Fill the caches of a request from copies in the order of positions, up to the first missing token."""
        # Copies of a later attempt replace those of rejected drafts, and of texts that started again.
        for copy in sorted(copies, key=lambda copy: (copy.attempt, copy.position)):
            new_sequence = self._make_sequence(copy.attempt)
            sequence = self.sequences.setdefault(copy.request, new_sequence)
            if copy.position > sequence.position:
                # An earlier copy is still in transit, or was lost with its sender.
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


class StageServer:
    """Serves the stages of a device: loads assigned layers, computes steps, stores copies and answers pings."""

    def __init__(
        self,
        mailbox: Mailbox,
        coordinator: str,
        model: CostModel,
        sampling: Sampling,
        weight_source_for: Callable[[Assign], WeightSource | None],
        load_seconds: Callable[[Assign], float],
        disk: Disk | None = None,
    ) -> None:
        """Register the handlers of messages.

        Args:
            mailbox: mailbox of the device.
            coordinator: device that assigns layers and receives results.
            model: costs of the model.
            sampling: rule by which the final stage chooses tokens.
            weight_source_for: function of an assignment that returns a source of its weights; None without numerics.
            load_seconds: function of an assignment that returns the time to load its layers.
            disk: disk from which layers beyond the memory are read for each step.
        """
        self.ranges: dict[int, LayerRange] = {}
        """Loaded layers by the number of the assignment; several while an assignment replaces an earlier one."""
        self._mailbox = mailbox
        self._device: Device = mailbox.device
        self._coordinator = coordinator
        self._model = model
        self._sampling = sampling
        self._weight_source_for = weight_source_for
        self._load_seconds = load_seconds
        self._disk = disk
        self._copies: dict[tuple[int, int], list[Copy]] = {}
        """Copies of another stage's caches, by first layer of the stage and request."""
        self._oldest = 0
        """Lowest number of a valid assignment."""
        # After a restart the program starts later, which shows the coordinator that the layers are lost.
        self._incarnation = self._device.now()
        mailbox.on(Ping, self._answer_ping)
        mailbox.on(Copy, self._store_copy)
        mailbox.on(Release, self._release_request)
        mailbox.on(Assign, self._start_loading)

    async def serve_steps(self) -> None:
        """Compute steps in the order of arrival, until cancelled."""
        while True:
            step = await self._mailbox.take(Step)
            layer_range = self.ranges.get(step.assignment)
            # After a restart the device has no layers, which the coordinator detects by the next pong.
            if layer_range is not None and layer_range.accepts(step):
                await self._compute_step(layer_range, step)

    def _answer_ping(self, ping: Ping) -> None:
        self._mailbox.post(ping.sender, Pong(ping.question, self._incarnation))

    def _store_copy(self, copy: Copy) -> None:
        self._copies.setdefault((copy.first, copy.request), []).append(copy)

    def _release_request(self, release: Release) -> None:
        for layer_range in self.ranges.values():
            layer_range.sequences.pop(release.request, None)
        for key in list(self._copies):
            _, request = key
            if request == release.request:
                del self._copies[key]

    def _start_loading(self, assign: Assign) -> None:
        if assign.oldest is not None:
            self._drop_before(assign.oldest)
        self._mailbox.start(self._load_layers(assign))

    def _drop_before(self, oldest: int) -> None:
        """Drop the ranges of assignments before ``oldest``, whose weights would take memory until the run ends."""
        self._oldest = oldest
        void_numbers = [number for number in self.ranges if number < oldest]
        for number in void_numbers:
            layer_range = self.ranges.pop(number)
            if self._disk is not None:
                self._disk.drop_window(layer_range.assign.first)

    async def _load_layers(self, assign: Assign) -> None:
        await self._device.sleep(self._load_seconds(assign))
        if assign.assignment < self._oldest:
            # The assignment became void when another device was lost during the loading.
            return
        weight_source = self._weight_source_for(assign)
        layer_range = LayerRange(self._model, assign, weight_source)
        for (first_layer, _), copies in self._copies.items():
            if first_layer == assign.first:
                layer_range.adopt_copies(copies)
        self.ranges[assign.assignment] = layer_range
        if self._disk is not None:
            self._disk.add_window(assign.first, layer_range.layer_count)
        positions = {}
        for request, sequence in layer_range.sequences.items():
            # Keys of JSON are strings.
            positions[str(request)] = sequence.position
        assigned = Assigned(assign.assignment, held=positions)
        self._mailbox.post(self._coordinator, assigned)

    async def _compute_step(self, layer_range: LayerRange, step: Step) -> None:
        """Compute a step, and send the result and copies of the new cache entries."""
        name = "prefill" if step.tokens > 1 else "decode"
        span = Span(name, batch=step.request, micro=step.position + step.tokens - 1)
        if self._disk is not None:
            await self._disk.wait_for_window(layer_range.assign.first)
        output = await self._device.compute(
            partial(layer_range.compute_step, step), layer_range.step_cost(step), span
        )
        if self._disk is not None:
            self._disk.read_ahead(layer_range.assign.first)
        if layer_range.assign.replica is not None:
            # Sent before the activations, so that copies of a token are in transit when the coordinator receives the
            # token.
            self._send_copy(layer_range, step, layer_range.assign.replica)
        if step.way:
            self._forward_activations(step, output)
        else:
            self._send_result(layer_range, step, output)

    def _forward_activations(self, step: Step, activations: Tensor | None) -> None:
        """Send activations to the next stage on the path of a step."""
        (next_device, assignment), *later_stages = step.way
        next_step = replace(
            step,
            assignment=assignment,
            way=later_stages,
            values=activations,
            padding=self._padding_for(activations, step.tokens),
        )
        self._mailbox.post(next_device, next_step)

    def _send_result(
        self, layer_range: LayerRange, step: Step, output: Tensor | None
    ) -> None:
        """Send the coordinator the tokens chosen by the final stage, or the activations of any other stage."""
        chosen: list[int] = []
        activations: Tensor | None = None
        padding = 0
        if layer_range.assign.final:
            # Chosen tokens take a few bytes, so the logits are not sent.
            chosen = self._choose_tokens(step, output)
        else:
            activations = output
            padding = self._padding_for(output, step.tokens)
        result = Result(
            step.request,
            step.attempt,
            computed=step.position + step.tokens,
            assignment=step.assignment,
            chosen=chosen,
            values=activations,
            padding=padding,
        )
        self._mailbox.post(self._coordinator, result)

    def _padding_for(self, activations: Tensor | None, tokens: int) -> int:
        """Return the bytes of padding in place of activations, without numerics, so that times on links are equal."""
        return 0 if activations is not None else self._model.message_bytes(tokens)

    def _choose_tokens(self, step: Step, logits: Tensor | None) -> list[int]:
        """Return the token after each of the last ``scored`` tokens of a step; without numerics always token 0."""
        if logits is None:
            return [0] * step.scored
        chosen = []
        # Position in the text of the first chosen token, on which the random choice depends.
        first_position = step.position + step.tokens - step.scored + 1
        for index, token_logits in enumerate(logits):
            position = first_position + index
            token = self._sampling.choose_token(token_logits, step.request, position)
            chosen.append(token)
        return chosen

    def _send_copy(self, layer_range: LayerRange, step: Step, replica: str) -> None:
        """Send the cache entries of a step to the device that would replace this one."""
        keys: Tensor | None = None
        values: Tensor | None = None
        padding = 0
        entries = layer_range.added_entries(step)
        if entries is not None:
            keys, values = entries
        else:
            model = self._model
            # Bytes of one token in the cache of one layer.
            entry_bytes = model.architecture.cache_bytes(model.cache_value_bytes)
            padding = entry_bytes * layer_range.layer_count * step.tokens
        copy = Copy(
            first=layer_range.assign.first,
            request=step.request,
            attempt=step.attempt,
            position=step.position,
            tokens=step.tokens,
            keys=keys,
            values=values,
            padding=padding,
        )
        self._mailbox.post(replica, copy)
