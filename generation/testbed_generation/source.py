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
    """The state of a request in flight.

    >>> progress = Progress(Request(0, prompt=(5, 6), arrival=0.0, limit=3), tokens=[7])
    >>> progress.all_tokens, progress.tokens_left
    ([5, 6, 7], 2)
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    """Tokens chosen so far."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens still allowed."""
        return self.request.limit - len(self.tokens)

    def is_complete(self, end: int | None) -> bool:
        """Return whether a text has all tokens, or ends with the token ``end``."""
        return self.tokens_left <= 0 or (bool(self.tokens) and self.tokens[-1] == end)

    @property
    def all_tokens(self) -> list[int]:
        """The prompt, and the tokens chosen so far."""
        return [*self.request.prompt, *self.tokens]


class Drive(Protocol):
    """How the tokens of a request get through the stages."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next tokens of a request, at least one, whatever is lost meanwhile."""

    def forget_request(self, number: int) -> None:
        """Forget a complete request."""


class Embedder:
    """Makes values of tokens on the source."""

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
        """Return the values of a request's tokens from a position on, and of drafts; None without numerics."""
        tokens = [*progress.all_tokens[position:], *drafts]
        span = Span(
            "embed", batch=progress.request.number, micro=position + len(tokens) - 1
        )
        return await self._device.compute(
            lambda: self._look_up(tokens), self._model.embedding_cost(len(tokens)), span
        )

    def _look_up(self, tokens: list[int]) -> Tensor | None:
        return None if self._table is None else embed(torch.tensor(tokens), self._table)


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
        """Send a step, and return the last stage's result; None once ``is_current`` returns false.

        Without numerics, the message has as many bytes as the values would take.
        """
        # Without values, a message has as many bytes as they would take, so times on links are the same.
        padding = self._model.message_bytes(step.tokens) if step.values is None else 0
        self._mailbox.post(device, replace(step, padding=padding))
        last = step.way[-1][1] if step.way else step.assignment
        key = (step.request, step.attempt, step.position + step.tokens, last)
        # A lost stage never answers, so each wait is short.
        while is_current():
            result = await self._mailbox.take(
                Result, key, deadline=self._mailbox.device.now() + self._heartbeat
            )
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
        """Losses when a request was last sent, by its number."""
        self._rejections: dict[int, int] = {}
        """How often drafts of a request were rejected, by its number."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next tokens of a request: one more than the stages accepted of the draft."""
        drafts: list[int] = []
        if self._draft is not None and progress.tokens:
            drafts = await self._draft.propose_tokens(
                progress.request, progress.all_tokens, progress.tokens_left - 1
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
            tokens = len(progress.all_tokens) + len(drafts) - position
            way = [(stage.device, stage.assignment) for stage in self._row.stages]
            (device, assignment), *others = way
            # Both numbers only rise, so a step that is still on its way never has a higher attempt than a later one.
            attempt = losses + self._rejections.get(number, 0)
            step = Step(
                assignment,
                number,
                attempt,
                position,
                tokens,
                others,
                values,
                len(drafts) + 1,
            )
            result = await self._calls.call_stages(
                device, step, partial(self._is_unchanged, losses)
            )
            if result is not None:
                return list(result.chosen)

    def _is_unchanged(self, losses: int) -> bool:
        """Return whether no stage was lost since so many losses."""
        return self._row.losses == losses

    def _cached_tokens(self, progress: Progress, losses: int) -> int:
        """Return how many tokens of a request all stages have in their caches."""
        number, newest = progress.request.number, len(progress.all_tokens) - 1
        if self._sent.get(number, losses) == losses:
            return newest if progress.tokens else 0
        before = self._sent[number]
        cached = newest
        for stage in self._row.stages:
            # Stages that were there before the loss still have all tokens.
            if stage.since > before:
                cached = min(cached, stage.held.get(str(number), 0))
        return cached

    def forget_request(self, number: int) -> None:
        """Forget a request."""
        self._sent.pop(number, None)
        self._rejections.pop(number, None)
        if self._draft is not None:
            self._draft.forget_request(number)
        self._row.release_request(number)


class ThroughSource:
    """Drive of a row: each stage returns values to the source, and the source keeps the inputs of each stage.

    A replacement receives all inputs of the lost stage at once, so a request continues with the same token (Petals;
    Borzunov et al., 2023).
    """

    def __init__(self, calls: StageCalls, row: Row, embedder: Embedder) -> None:
        self._calls = calls
        self._row = row
        self._embedder = embedder
        self._inputs: dict[tuple[int, int], list[Tensor | None]] = {}
        """What each stage was sent, by request and first layer."""
        self._holders: dict[tuple[int, int], int] = {}
        """The assignment that has it in its caches."""

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next token of a request."""
        position = len(progress.all_tokens) - 1 if progress.tokens else 0
        tokens = len(progress.all_tokens) - position
        values = await self._embedder.embed_tokens(progress, position)
        for first in [stage.first for stage in self._row.stages]:
            # Kept before the stage is called, so that a replacement is sent the newest tokens as well.
            self._inputs.setdefault((progress.request.number, first), []).append(values)
            result = await self._call_stage(
                progress.request.number, first, position, tokens
            )
            values = result.values
        return list(result.chosen)

    def forget_request(self, number: int) -> None:
        """Forget the inputs of a request."""
        for key in list(self._inputs):
            if key[0] == number:
                del self._inputs[key]
                del self._holders[key]
        self._row.release_request(number)

    async def _call_stage(
        self, number: int, first: int, position: int, tokens: int
    ) -> Result:
        """Return a stage's result for the newest tokens; a new stage computes all earlier tokens as well."""
        key = (number, first)
        while True:
            await self._row.wait_until_whole()
            stage, losses = self._row.stage_at(first), self._row.losses
            new = self._holders.get(key, stage.assignment) != stage.assignment
            self._holders[key] = stage.assignment
            inputs = self._inputs[key] if new else self._inputs[key][-1:]
            begin = 0 if new else position
            values = (
                None
                if inputs[0] is None
                else torch.cat([part for part in inputs if part is not None])
            )
            step = Step(
                stage.assignment,
                number,
                losses,
                begin,
                position + tokens - begin,
                [],
                values,
            )
            result = await self._calls.call_stages(
                stage.device, step, partial(self._is_held, stage)
            )
            if result is None:
                continue
            # A replay returns the values of all tokens; the following stages have the earlier ones in their caches.
            return result if result.values is None else keep_last(result, tokens)

    def _is_held(self, stage: Stage) -> bool:
        """Return whether a stage still has the same assignment."""
        return self._row.stage_at(stage.first).assignment == stage.assignment


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
    """The token after which a text is complete; None: each has as many tokens as it may."""
    complete: Callable[[int, Sequence[int]], None] = lambda number, tokens: None
    """Is called with the number and the tokens of a request that is complete."""
    text: Callable[[int, int], str] | None = None
    """Returns the text of a request's next token for the record; None where no tokens are computed."""


async def serve_requests(device: Device, drive: Drive, service: Service) -> None:
    """Generate the texts of all requests; records ``arrival``, ``token`` and ``request``."""
    # A semaphore admits waiting requests in the order in which they began to wait, that of their arrival.
    slots = asyncio.Semaphore(service.concurrency)

    async def serve_request(request: Request) -> None:
        await device.sleep(max(0.0, request.arrival - device.now()))
        device.record("arrival", request=request.number, tokens=len(request.prompt))
        async with slots:
            progress = Progress(request)
            while not progress.is_complete(service.end):
                for token in await drive.next_tokens(progress):
                    if progress.is_complete(service.end):
                        break
                    progress.tokens.append(token)
                    text = {}
                    if service.text is not None:
                        text["text"] = service.text(request.number, token)
                    device.record(
                        "token",
                        request=request.number,
                        micro=len(progress.tokens) - 1,
                        token=token,
                        **text,
                    )
            drive.forget_request(request.number)
            service.complete(request.number, progress.tokens)
            device.record(
                "request",
                request=request.number,
                latency=device.now() - request.arrival,
            )

    async with asyncio.TaskGroup() as group:
        for request in service.requests:
            group.create_task(serve_request(request))
