"""The source of the requests: sends tokens through the stages and receives the next ones.

Tokens depend on the weights, the prompt and the seed alone. So a request that continues after the loss of a stage gets
the same tokens as without it, and each token is recorded once.
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
from testbed_generation.network import embed
from testbed_generation.requests import Request
from testbed_generation.row import Row, Stage


@dataclass
class Progress:
    """A request in flight with the tokens chosen for it so far.

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

    def is_complete(self, end: int | None) -> bool:
        """Return whether a text has all tokens, or ends with the token ``end``."""
        if self.tokens_left <= 0:
            return True
        return bool(self.tokens) and self.tokens[-1] == end

    @property
    def all_tokens(self) -> list[int]:
        """The prompt, and the tokens chosen so far."""
        return [*self.request.prompt, *self.tokens]


class Drive(Protocol):
    """A way of passing tokens through the layers of the network, and of repeating the pass after a loss."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next tokens of a request, at least one; losses of stages delay them and change none."""

    def forget_request(self, number: int) -> None:
        """Forget a complete request."""


class Embedder:
    """The token embedding on the source: the first values of each token."""

    def __init__(
        self, mailbox: Mailbox, model: CostModel, table: Tensor | None
    ) -> None:
        """``table`` is the token embedding; None: without numerics."""
        self._device = mailbox.device
        self._model = model
        self._table = table

    async def embed_tokens(
        self, progress: Progress, position: int, drafts: Sequence[int] = ()
    ) -> Tensor | None:
        """Return the values of a request's tokens from a position on, and of drafts: shape (tokens, width).

        None without numerics.
        """
        tokens = [*progress.all_tokens[position:], *drafts]
        last_position = position + len(tokens) - 1
        # Charts and faults identify a pass by its last token, as everywhere in this package.
        span = Span("embed", batch=progress.request.number, micro=last_position)
        cost = self._model.embedding_cost(len(tokens))
        return await self._device.compute(lambda: self._look_up(tokens), cost, span)

    def _look_up(self, tokens: list[int]) -> Tensor | None:
        if self._table is None:
            return None
        return embed(torch.tensor(tokens), self._table)


class StageCalls:
    """Sends steps to stages and receives their results."""

    def __init__(self, mailbox: Mailbox, model: CostModel, heartbeat: float) -> None:
        """Check every ``heartbeat`` seconds whether a result may still arrive."""
        self._mailbox = mailbox
        self._model = model
        self._heartbeat = heartbeat

    async def call_stages(
        self, device: str, step: Step, is_current: Callable[[], bool]
    ) -> Result | None:
        """Send a step, and return the last stage's result; None once ``is_current`` returns false."""
        padding = 0
        if step.values is None:
            # Without values, a message has as many bytes as they would take, so times on links are the same.
            padding = self._model.message_bytes(step.tokens)
        self._mailbox.post(device, replace(step, padding=padding))
        last_assignment = step.assignment
        if step.way:
            _, last_assignment = step.way[-1]
        computed = step.position + step.tokens
        # The fields that identify a `Result`; a late result of an earlier attempt does not match.
        key = (step.request, step.attempt, computed, last_assignment)
        # A lost stage never answers, so each wait is short.
        while is_current():
            deadline = self._mailbox.device.now() + self._heartbeat
            result = await self._mailbox.take(Result, key, deadline=deadline)
            if result is not None:
                return result
        return None


class AlongRow:
    """Drive of a row: each stage sends values to the next one, and the last stage sends the token to the source.

    After a loss the source sends the tokens again from the first one on, or only the missing tokens if the new stages
    had copies of the caches.
    """

    def __init__(
        self,
        device: Device,
        calls: StageCalls,
        row: Row,
        embedder: Embedder,
        draft: Draft | None = None,
    ) -> None:
        self._device = device
        self._calls = calls
        self._row = row
        self._embedder = embedder
        self._draft = draft
        self._sent: dict[int, int] = {}
        """The row's number of losses when a request was last sent, by number of the request."""
        self._rejections: dict[int, int] = {}
        """Number of steps with a rejected draft, by number of the request."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next tokens of a request: one more than the stages accepted of the draft."""
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
            await self._row.wait_until_whole()
            number, losses = progress.request.number, self._row.losses
            position = self._cached_tokens(progress, losses)
            self._sent[number] = losses
            values = await self._embedder.embed_tokens(progress, position, drafts)
            if self._row.losses != losses:
                # A stage was lost while the source computed: the way would lead to a device that is gone.
                continue
            way = [(stage.device, stage.assignment) for stage in self._row.stages]
            (device, assignment), *later_stages = way
            step = Step(
                assignment,
                request=number,
                # Both numbers only rise, so a step still on its way never has a higher attempt than a later one.
                attempt=losses + self._rejections.get(number, 0),
                position=position,
                tokens=len(progress.all_tokens) + len(drafts) - position,
                way=later_stages,
                values=values,
                # One pass verifies all drafts: logits follow the newest known token and each draft.
                scored=len(drafts) + 1,
            )
            is_current = partial(self._is_unchanged, losses)
            result = await self._calls.call_stages(device, step, is_current)
            if result is not None:
                return list(result.chosen)

    def _is_unchanged(self, losses: int) -> bool:
        """Return whether the row has had no further loss since ``losses`` losses."""
        return self._row.losses == losses

    def _cached_tokens(self, progress: Progress, losses: int) -> int:
        """Return the number of tokens of a request that all stages have in their caches.

        After a loss a new stage has the tokens of which it had copies, and none without copies.
        """
        number = progress.request.number
        # The newest token was chosen by the last pass and has not been sent to any stage.
        newest = len(progress.all_tokens) - 1
        losses_before = self._sent.get(number, losses)
        if losses_before == losses:
            return newest if progress.tokens else 0
        cached = newest
        for stage in self._row.stages:
            # Stages that were there before the loss still have all tokens.
            if stage.since > losses_before:
                cached = min(cached, stage.held.get(str(number), 0))
        return cached

    def forget_request(self, number: int) -> None:
        """Forget a complete request, also on the stages."""
        self._sent.pop(number, None)
        self._rejections.pop(number, None)
        if self._draft is not None:
            self._draft.forget_request(number)
        self._row.release_request(number)


class ThroughSource:
    """Drive of a row: each stage returns values to the source, and the source keeps the inputs of each stage.

    A replacement receives all inputs of the lost stage at once, so a request continues with the same token (Petals;
    Borzunov et al., 2023). If a loss divides the layers anew, the request begins at its prompt once more.
    """

    def __init__(self, calls: StageCalls, row: Row, embedder: Embedder) -> None:
        self._calls = calls
        self._row = row
        self._embedder = embedder
        self._inputs: dict[tuple[int, int], list[Tensor | None]] = {}
        """Inputs of each stage, one entry for each pass, by request and first layer of the stage."""
        self._holders: dict[tuple[int, int], int] = {}
        """The assignment with these inputs in its KV caches, by request and first layer of the stage."""
        self._first_layers: dict[int, tuple[int, ...]] = {}
        """First layers of the stages that a request has passed, by number of the request."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next token of a request."""
        number = progress.request.number
        while True:
            has_passed = number in self._first_layers
            position = len(progress.all_tokens) - 1 if has_passed else 0
            values = await self._embedder.embed_tokens(progress, position)
            first_layers = self._row.first_layers
            if self._first_layers.setdefault(number, first_layers) == first_layers:
                tokens = len(progress.all_tokens) - position
                result = await self._pass_stages(number, values, position, tokens)
                if result is not None:
                    return list(result.chosen)
            # The kept inputs belong to layers where no stage begins any more.
            self._forget_inputs(number)

    def forget_request(self, number: int) -> None:
        """Forget the inputs of a complete request, also on the stages."""
        self._forget_inputs(number)
        self._row.release_request(number)

    def _forget_inputs(self, number: int) -> None:
        self._first_layers.pop(number, None)
        for key in list(self._inputs):
            request, _ = key
            if request == number:
                del self._inputs[key]
                # A stage that was not called has inputs and no holder.
                self._holders.pop(key, None)

    async def _pass_stages(
        self, number: int, values: Tensor | None, position: int, tokens: int
    ) -> Result | None:
        """Send the newest tokens of a request to one stage after the other; return the result of the last one.

        None if the layers were divided anew meanwhile.
        """
        result: Result | None = None
        for first in self._first_layers[number]:
            # Kept before the stage is called, so that a replacement is sent the newest tokens as well.
            self._inputs.setdefault((number, first), []).append(values)
            result = await self._call_stage(number, first, position, tokens)
            if result is None:
                return None
            values = result.values
        return result

    async def _call_stage(
        self, number: int, first: int, position: int, tokens: int
    ) -> Result | None:
        """Return a stage's result for the newest tokens; a new stage computes all earlier tokens as well.

        None if the layers were divided anew.
        """
        key = (number, first)
        while True:
            await self._row.wait_until_whole()
            if self._row.first_layers != self._first_layers[number]:
                return None
            stage = self._row.stage_at(first)
            is_new = self._holders.get(key, stage.assignment) != stage.assignment
            self._holders[key] = stage.assignment
            # A new stage has empty caches: it replays the text from its first token on.
            inputs = self._inputs[key] if is_new else self._inputs[key][-1:]
            begin = 0 if is_new else position
            step = Step(
                stage.assignment,
                request=number,
                attempt=self._row.losses,
                position=begin,
                tokens=position + tokens - begin,
                # No further stages: each result returns to the source.
                way=[],
                values=_join_inputs(inputs),
            )
            is_current = partial(self._is_held, stage)
            result = await self._calls.call_stages(stage.device, step, is_current)
            if result is None:
                continue
            # A replay returns the values of all tokens; the following stages have the earlier ones in their caches.
            return result if result.values is None else keep_last(result, tokens)

    def _is_held(self, stage: Stage) -> bool:
        """Return whether a stage still has the same assignment."""
        return stage.assignment in [each.assignment for each in self._row.stages]


def _join_inputs(inputs: Sequence[Tensor | None]) -> Tensor | None:
    """Return the inputs of several passes as one tensor, (tokens, width); None without numerics."""
    parts = []
    for part in inputs:
        if part is not None:
            parts.append(part)
    return torch.cat(parts) if parts else None


def keep_last(result: Result, tokens: int) -> Result:
    """Return a result with the values of the last tokens only."""
    assert result.values is not None
    return replace(result, values=result.values[-tokens:])


@dataclass(frozen=True)
class Service:
    """The work of a source."""

    requests: Sequence[Request]
    concurrency: int = 1
    """Requests in flight at once, in the order of their arrival."""
    end: int | None = None
    """The token after which a text is complete; None: each text has as many tokens as its request allows."""
    complete: Callable[[int, Sequence[int]], None] = lambda number, tokens: None
    """Callback for each complete request: its number and its tokens."""
    text: Callable[[int, int], str] | None = None
    """Function of a request's number and its next token, which returns the token's text; None without numerics."""


async def serve_requests(device: Device, drive: Drive, service: Service) -> None:
    """Generate the texts of all requests; records ``arrival``, ``token`` and ``request``.

    Raises the error of the first request that fails.
    """
    # A semaphore admits waiting requests in the order in which they began to wait, that of their arrival.
    slots = asyncio.Semaphore(service.concurrency)

    async def serve_request(request: Request) -> None:
        await device.sleep(max(0.0, request.arrival - device.now()))
        device.record("arrival", request=request.number, tokens=len(request.prompt))
        async with slots:
            await _generate_text(device, drive, service, request)

    try:
        async with asyncio.TaskGroup() as group:
            for request in service.requests:
                group.create_task(serve_request(request))
    except BaseExceptionGroup as errors:
        # A user reads the error of a request as it is, not as a part of a group; the others usually follow from it.
        first = errors.exceptions[0]
        raise first from first.__cause__


async def _generate_text(
    device: Device, drive: Drive, service: Service, request: Request
) -> None:
    """Generate the text of one request, and record each token and the end."""
    progress = Progress(request)
    while not progress.is_complete(service.end):
        for token in await drive.next_tokens(progress):
            # Of several accepted tokens, those after the end of the text do not count.
            if progress.is_complete(service.end):
                break
            progress.tokens.append(token)
            _record_token(device, service, progress, token)
    drive.forget_request(request.number)
    service.complete(request.number, progress.tokens)
    latency = device.now() - request.arrival
    device.record("request", request=request.number, latency=latency)


def _record_token(
    device: Device, service: Service, progress: Progress, token: int
) -> None:
    number = progress.request.number
    text = {}
    if service.text is not None:
        text["text"] = service.text(number, token)
    device.record(
        "token",
        request=number,
        # Faults wait for a token by this key: `{event: token, micro: 49}` is the fiftieth token.
        micro=len(progress.tokens) - 1,
        token=token,
        **text,
    )
