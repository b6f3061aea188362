"""Decoding on the coordinator: sends tokens through the stages and receives the next tokens.

Tokens depend on the weights, the prompt and the seed alone. Therefore a request that continues after the loss of a
stage gets the same tokens as without the loss, and each token is recorded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from testbed.device import Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed_generation.costs import CostModel
from testbed_generation.draft import Draft
from testbed_generation.messages import Result, Step
from testbed_generation.pipeline import Pipeline, Stage
from testbed_generation.requests import Request
from testbed_generation.transformer import embed


@dataclass
class Progress:
    """A request in flight with the tokens chosen so far.

    >>> progress = Progress(Request(0, prompt=(5, 6), arrival=0.0, limit=3), tokens=[7])
    >>> progress.all_tokens, progress.tokens_left
    ([5, 6, 7], 2)
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    """Tokens chosen so far, without the prompt."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens still allowed."""
        return self.request.limit - len(self.tokens)

    def is_complete(self, end_token: int | None) -> bool:
        """Return whether the text has all allowed tokens, or ends with ``end_token``."""
        if self.tokens_left <= 0:
            return True
        return bool(self.tokens) and self.tokens[-1] == end_token

    @property
    def all_tokens(self) -> list[int]:
        """The prompt, and the tokens chosen so far."""
        return [*self.request.prompt, *self.tokens]


class Decoder(Protocol):
    """Computes the next tokens of a request on the devices, and repeats a computation after the loss of a device."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return one or more next tokens of a request; the loss of a stage delays tokens and changes none."""

    def forget_request(self, number: int) -> None:
        """Drop all state of a complete request."""


class Embedder:
    """The token embedding on the coordinator: the activations before the first layer."""

    def __init__(
        self, mailbox: Mailbox, model: CostModel, embedding: Tensor | None
    ) -> None:
        """``embedding`` is the token embedding; None without numerics."""
        self._device = mailbox.device
        self._model = model
        self._embedding = embedding

    async def embed_tokens(
        self, progress: Progress, position: int, drafts: Sequence[int] = ()
    ) -> Tensor | None:
        """Return the embedding of a request's tokens from a position on, and of drafts: shape (tokens, width).

        None without numerics.
        """
        tokens = [*progress.all_tokens[position:], *drafts]
        last_position = position + len(tokens) - 1
        # Charts and faults identify a pass by the position of its last token, as in the spans of the stages.
        span = Span("embed", batch=progress.request.number, micro=last_position)
        cost = self._model.embedding_cost(len(tokens))
        return await self._device.compute(lambda: self._look_up(tokens), cost, span)

    def _look_up(self, tokens: list[int]) -> Tensor | None:
        if self._embedding is None:
            return None
        return embed(torch.tensor(tokens), self._embedding)


class StageClient:
    """Sends steps to stages, and receives their results."""

    def __init__(self, mailbox: Mailbox, model: CostModel, heartbeat: float) -> None:
        """``heartbeat`` is the interval in seconds between checks whether a result can still arrive."""
        self._mailbox = mailbox
        self._model = model
        self._heartbeat = heartbeat

    async def compute_step(
        self, device: str, step: Step, is_current: Callable[[], bool]
    ) -> Result | None:
        """Send a step to a device, and return the result of the step's last stage.

        None as soon as ``is_current`` returns false.
        """
        padding = 0
        if step.values is None:
            # Padding replaces the activations, so that times on links are those with numerics.
            padding = self._model.message_bytes(step.tokens)
        self._mailbox.post(device, replace(step, padding=padding))
        last_assignment = step.assignment
        if step.way:
            _, last_assignment = step.way[-1]
        computed = step.position + step.tokens
        # The fields that identify a `Result`; a late result of an earlier attempt does not match.
        key = (step.request, step.attempt, computed, last_assignment)
        # A lost stage never answers, so each wait ends after one heartbeat.
        while is_current():
            deadline = self._mailbox.device.now() + self._heartbeat
            result = await self._mailbox.take(Result, key, deadline=deadline)
            if result is not None:
                return result
        return None


class ForwardingDecoder:
    """A decoder whose stages forward activations to the next stage; the last stage sends the token to the coordinator.

    After a loss the coordinator sends all tokens again, or only the missing tokens if the new stages had copies of the
    caches.
    """

    def __init__(
        self,
        device: Device,
        client: StageClient,
        pipeline: Pipeline,
        embedder: Embedder,
        draft: Draft | None = None,
    ) -> None:
        self._device = device
        self._client = client
        self._pipeline = pipeline
        self._embedder = embedder
        self._draft = draft
        self._losses_when_sent: dict[int, int] = {}
        """The pipeline's number of losses when a request was last sent, by number of the request."""
        self._rejections: dict[int, int] = {}
        """Number of steps with a rejected draft, by number of the request."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next tokens of a request: the accepted drafts, and one more token."""
        drafts: list[int] = []
        if self._draft is not None and progress.tokens:
            # The stages choose one token beyond the accepted drafts, which needs no draft.
            limit = progress.tokens_left - 1
            drafts = await self._draft.propose_tokens(
                progress.request, progress.all_tokens, limit
            )
        chosen = await self._choose_tokens(progress, drafts)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
            accepted += 1
        number = progress.request.number
        if drafts:
            self._device.record(
                "draft", request=number, proposed=len(drafts), accepted=accepted
            )
        if accepted < len(drafts):
            # A higher attempt makes the stages drop the rejected tokens from their caches.
            self._rejections[number] = self._rejections.get(number, 0) + 1
        return chosen[: accepted + 1]

    async def _choose_tokens(
        self, progress: Progress, drafts: Sequence[int]
    ) -> list[int]:
        """Return the tokens chosen by the stages after the newest token of a request and after each draft."""
        while True:
            await self._pipeline.wait_until_ready()
            number = progress.request.number
            losses = self._pipeline.losses
            position = self._cached_tokens(progress, losses)
            self._losses_when_sent[number] = losses
            activations = await self._embedder.embed_tokens(progress, position, drafts)
            if self._pipeline.losses != losses:
                # A stage was lost during the embedding: the path would lead to a lost device.
                continue
            path = []
            for stage in self._pipeline.stages:
                path.append((stage.device, stage.assignment))
            (device, assignment), *later_stages = path
            step = Step(
                assignment,
                request=number,
                # Both numbers only rise, so a step in transit never has a higher attempt than a later step.
                attempt=losses + self._rejections.get(number, 0),
                position=position,
                tokens=len(progress.all_tokens) + len(drafts) - position,
                way=later_stages,
                values=activations,
                # One pass verifies all drafts: it computes logits after the newest known token and after each draft.
                scored=len(drafts) + 1,
            )
            is_current = partial(self._is_unchanged, losses)
            result = await self._client.compute_step(device, step, is_current)
            if result is not None:
                return list(result.chosen)

    def _is_unchanged(self, losses: int) -> bool:
        """Return whether the pipeline has had no further loss since ``losses`` losses."""
        return self._pipeline.losses == losses

    def _cached_tokens(self, progress: Progress, losses: int) -> int:
        """Return the number of tokens of a request in the caches of all stages.

        After a loss a new stage has in its caches the tokens of which it had copies; without copies it has none.
        """
        number = progress.request.number
        # The newest token was chosen by the last pass, and no stage has received it.
        newest = len(progress.all_tokens) - 1
        losses_before = self._losses_when_sent.get(number, losses)
        if losses_before == losses:
            return newest if progress.tokens else 0
        cached = newest
        for stage in self._pipeline.stages:
            # Stages that existed before the loss still have all tokens.
            if stage.loss_number > losses_before:
                cached = min(cached, stage.cached_tokens.get(str(number), 0))
        return cached

    def forget_request(self, number: int) -> None:
        """Drop all state of a complete request, also on the stages."""
        self._losses_when_sent.pop(number, None)
        self._rejections.pop(number, None)
        if self._draft is not None:
            self._draft.forget_request(number)
        self._pipeline.release_request(number)


class RelayingDecoder:
    """A decoder whose stages return activations to the coordinator, which relays them and keeps each stage's inputs.

    A replacement receives all inputs of the lost stage at once, so a request continues with the same token (Petals;
    Borzunov et al., 2023). If the layers are divided anew after a loss, the request starts again from its prompt.
    """

    def __init__(
        self, client: StageClient, pipeline: Pipeline, embedder: Embedder
    ) -> None:
        self._client = client
        self._pipeline = pipeline
        self._embedder = embedder
        self._inputs: dict[tuple[int, int], list[Tensor | None]] = {}
        """Inputs of each stage, one entry for each pass, by request and first layer of the stage."""
        self._assignments: dict[tuple[int, int], int] = {}
        """The assignment that has computed these inputs, by request and first layer of the stage."""
        self._first_layers: dict[int, tuple[int, ...]] = {}
        """First layers of the stages that a request has passed, by number of the request."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next token of a request."""
        number = progress.request.number
        while True:
            has_passed = number in self._first_layers
            position = len(progress.all_tokens) - 1 if has_passed else 0
            activations = await self._embedder.embed_tokens(progress, position)
            first_layers = self._pipeline.first_layers
            if self._first_layers.setdefault(number, first_layers) == first_layers:
                tokens = len(progress.all_tokens) - position
                result = await self._pass_stages(number, activations, position, tokens)
                if result is not None:
                    return list(result.chosen)
            # The layers were divided anew: no stage begins at the layers of the kept inputs.
            self._forget_inputs(number)

    def forget_request(self, number: int) -> None:
        """Drop the inputs of a complete request, and the request's caches on the stages."""
        self._forget_inputs(number)
        self._pipeline.release_request(number)

    def _forget_inputs(self, number: int) -> None:
        self._first_layers.pop(number, None)
        for key in list(self._inputs):
            request, _ = key
            if request == number:
                del self._inputs[key]
                # A stage that was not called yet has inputs and no assignment.
                self._assignments.pop(key, None)

    async def _pass_stages(
        self, number: int, activations: Tensor | None, position: int, tokens: int
    ) -> Result | None:
        """Send the newest tokens of a request to one stage after the other; return the result of the last stage.

        None if the layers were divided anew meanwhile.
        """
        result: Result | None = None
        for first_layer in self._first_layers[number]:
            # Kept before the stage is called, so that a replacement receives the newest tokens as well.
            self._inputs.setdefault((number, first_layer), []).append(activations)
            result = await self._call_stage(number, first_layer, position, tokens)
            if result is None:
                return None
            activations = result.values
        return result

    async def _call_stage(
        self, number: int, first_layer: int, position: int, tokens: int
    ) -> Result | None:
        """Return a stage's result for the newest tokens; a new stage computes all earlier tokens as well.

        None if the layers were divided anew.
        """
        key = (number, first_layer)
        while True:
            await self._pipeline.wait_until_ready()
            if self._pipeline.first_layers != self._first_layers[number]:
                return None
            stage = self._pipeline.stage_at(first_layer)
            is_new = self._assignments.get(key, stage.assignment) != stage.assignment
            self._assignments[key] = stage.assignment
            # A new stage has empty caches: it replays the text from its first token on.
            inputs = self._inputs[key] if is_new else self._inputs[key][-1:]
            start = 0 if is_new else position
            step = Step(
                stage.assignment,
                request=number,
                attempt=self._pipeline.losses,
                position=start,
                tokens=position + tokens - start,
                # No further stages: each result returns to the coordinator.
                way=[],
                values=_join_inputs(inputs),
            )
            is_current = partial(self._is_assigned, stage)
            result = await self._client.compute_step(stage.device, step, is_current)
            if result is None:
                continue
            if result.values is None:
                return result
            # A replay returns the activations of all tokens. The later stages have the earlier tokens in their caches.
            return replace(result, values=result.values[-tokens:])

    def _is_assigned(self, stage: Stage) -> bool:
        """Return whether the assignment of a stage is still in use."""
        assignments = [current.assignment for current in self._pipeline.stages]
        return stage.assignment in assignments


def _join_inputs(inputs: Sequence[Tensor | None]) -> Tensor | None:
    """Return the inputs of several passes as one tensor of shape (tokens, width); None without numerics."""
    tensors = []
    for tensor in inputs:
        if tensor is not None:
            tensors.append(tensor)
    return torch.cat(tensors) if tensors else None


@dataclass(frozen=True)
class Service:
    """The requests served by a coordinator, and functions for the generated tokens."""

    requests: Sequence[Request]
    concurrency: int = 1
    """Number of requests in flight at once, in the order of their arrival."""
    end_token: int | None = None
    """The token after which a text is complete; None: each text has as many tokens as its request allows."""
    on_complete: Callable[[int, Sequence[int]], None] = lambda number, tokens: None
    """Callback for each complete request: its number and its tokens."""
    token_text: Callable[[int, int], str] | None = None
    """Function of a request's number and its next token that returns the token's text; None without numerics."""


async def serve_requests(device: Device, decoder: Decoder, service: Service) -> None:
    """Generate the texts of all requests; records ``arrival``, ``token`` and ``request``.

    Raises the error of the first request that fails.
    """
    # A semaphore admits waiting requests in the order in which they began to wait, that of their arrival.
    slots = asyncio.Semaphore(service.concurrency)

    async def serve_request(request: Request) -> None:
        await device.sleep(max(0.0, request.arrival - device.now()))
        device.record("arrival", request=request.number, tokens=len(request.prompt))
        async with slots:
            await _generate_text(device, decoder, service, request)

    try:
        async with asyncio.TaskGroup() as group:
            for request in service.requests:
                group.create_task(serve_request(request))
    except BaseExceptionGroup as errors:
        # The user gets the error of one request instead of a group of errors; the other errors usually follow from it.
        first_error = errors.exceptions[0]
        raise first_error from first_error.__cause__


async def _generate_text(
    device: Device, decoder: Decoder, service: Service, request: Request
) -> None:
    """Generate the text of one request, and record each token and the end."""
    progress = Progress(request)
    while not progress.is_complete(service.end_token):
        for token in await decoder.next_tokens(progress):
            # Accepted drafts after the end of the text do not count.
            if progress.is_complete(service.end_token):
                break
            progress.tokens.append(token)
            _record_token(device, service, progress, token)
    decoder.forget_request(request.number)
    service.on_complete(request.number, progress.tokens)
    latency = device.now() - request.arrival
    device.record("request", request=request.number, latency=latency)


def _record_token(
    device: Device, service: Service, progress: Progress, token: int
) -> None:
    number = progress.request.number
    text = {}
    if service.token_text is not None:
        text["text"] = service.token_text(number, token)
    device.record(
        "token",
        request=number,
        # Faults wait for a token by this key: `{event: token, micro: 49}` is the fiftieth token.
        micro=len(progress.tokens) - 1,
        token=token,
        **text,
    )
