"""Weights, sampling and requests of a context, for the programs of all methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from testbed.device import Device
from testbed_generation.draft import Draft
from testbed_generation.sampling import Sampling
from testbed_generation.source import Service
from testbed_generation.tokens import TextDecoder, text_of
from testbed_generation.weights import DRAFT, EMBEDDING, Given, Seeded, Source
from testbed_generation.workload import GenerateContext, GenerateProblem


def weights_of(context: GenerateContext[Any, Any]) -> Source | None:
    """Return the source of a device's weights, a file or the seed; None without numerics."""
    problem = context.problem
    if not problem.workload.is_computed:
        return None
    if context.weights is None:
        return Seeded(problem.model.architecture, problem.seed)
    context.on_weights()
    return Given(context.weights)


def embedding_of(source: Source | None) -> Tensor | None:
    """Return the token embedding; None without numerics."""
    return None if source is None else source.read(EMBEDDING)


def sampling_of(problem: GenerateProblem[Any]) -> Sampling:
    """Return the rule by which tokens are chosen."""
    part = problem.workload.sampling
    return Sampling(part.temperature, part.top_p, problem.seed)


def draft_of(device: Device, context: GenerateContext[Any, Any]) -> Draft | None:
    """Return the draft model, on the source; None without one."""
    problem = context.problem
    if problem.draft is None or problem.workload.draft is None:
        return None
    source: Source = Seeded(problem.draft.architecture, problem.seed)
    if problem.workload.draft.weights is not None and context.weights is not None:
        # The weights of both models are sent together; the names of the draft model's have a prefix.
        own = {}
        for name, weight in context.weights.items():
            if name.startswith(DRAFT):
                own[name.removeprefix(DRAFT)] = weight
        source = Given(own)
    return Draft(
        device,
        problem.draft,
        problem.workload.draft.proposed,
        sampling_of(problem),
        source,
    )


def load_seconds(problem: GenerateProblem[Any], layers: int) -> float:
    """Return the seconds of reading ``layers`` layers from a device's disk; 0 without a `load_rate`."""
    rate = problem.workload.load_rate
    if rate is None:
        return 0.0
    layer_bytes = problem.model.architecture.layer_bytes(problem.model.storage)
    return layers * layer_bytes / rate


def service_of(device: Device, context: GenerateContext[Any, Any]) -> Service:
    """Return the work of the source; records the text of each complete request if tokens are computed."""
    problem = context.problem

    is_computed = problem.workload.is_computed

    def record_text(number: int, tokens: Sequence[int]) -> None:
        if not is_computed:
            return
        # The token that ends a text is no part of the text.
        shown = tokens[:-1] if tokens[-1] == problem.end else tokens
        device.record("text", request=number, text=text_of(shown, context.pieces))

    decoders: dict[int, TextDecoder] = {}
    """By request, since a character may take several tokens, between which other requests get theirs."""

    def text_of_token(number: int, token: int) -> str:
        if token == problem.end:
            return ""
        decoder = decoders.setdefault(number, TextDecoder(context.pieces))
        return decoder.decode(token)

    return Service(
        problem.requests,
        problem.workload.concurrency,
        end=problem.end,
        complete=record_text,
        text=text_of_token if is_computed else None,
    )
