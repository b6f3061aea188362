"""Constructors of the objects that the programs of all methods use, from the context of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from testbed.device import Device
from testbed_generation.decoding import Service
from testbed_generation.draft import Draft
from testbed_generation.sampling import Sampling
from testbed_generation.tokens import TextDecoder, decode_tokens
from testbed_generation.weights import (
    DRAFT,
    EMBEDDING,
    ReceivedWeights,
    SeededWeights,
    WeightSource,
)
from testbed_generation.workload import GenerateContext, GenerateProblem


def open_weight_source(context: GenerateContext[Any, Any]) -> WeightSource | None:
    """Return the source of a device's weights: received weights or the seed; None without numerics."""
    problem = context.problem
    if not problem.workload.is_computed:
        return None
    if context.weights is None:
        return SeededWeights(problem.model.architecture, problem.seed)
    context.on_weights()
    return ReceivedWeights(context.weights)


def read_embedding(weight_source: WeightSource | None) -> Tensor | None:
    """Return the token embedding; None without numerics."""
    return None if weight_source is None else weight_source.read(EMBEDDING)


def make_sampling(problem: GenerateProblem[Any]) -> Sampling:
    """Return the rule by which tokens are chosen."""
    part = problem.workload.sampling
    return Sampling(part.temperature, part.top_p, problem.seed)


def make_draft(device: Device, context: GenerateContext[Any, Any]) -> Draft | None:
    """Return the draft model for the coordinator; None if the scenario has no draft."""
    problem = context.problem
    if problem.draft is None or problem.workload.draft is None:
        return None
    weight_source: WeightSource = SeededWeights(
        problem.draft.architecture, problem.seed
    )
    if problem.workload.draft.weights is not None and context.weights is not None:
        # The weights of both models are sent together; names of weights of the draft model have a prefix.
        draft_weights = {}
        for name, weight in context.weights.items():
            if name.startswith(DRAFT):
                draft_weights[name.removeprefix(DRAFT)] = weight
        weight_source = ReceivedWeights(draft_weights)
    return Draft(
        device,
        problem.draft,
        max_proposed=problem.workload.draft.proposed,
        sampling=make_sampling(problem),
        weight_source=weight_source,
    )


def load_seconds(problem: GenerateProblem[Any], layers: int) -> float:
    """Return the seconds of reading ``layers`` layers from a device's disk; 0 without a `load_rate`."""
    rate = problem.workload.load_rate
    if rate is None:
        return 0.0
    layer_bytes = problem.model.architecture.layer_bytes(problem.model.storage)
    return layers * layer_bytes / rate


def make_service(device: Device, context: GenerateContext[Any, Any]) -> Service:
    """Return the requests for the coordinator, with callbacks that decode tokens to text and record the texts.

    Without numerics there are no texts.
    """
    problem = context.problem
    is_computed = problem.workload.is_computed

    def record_text(number: int, tokens: Sequence[int]) -> None:
        if not is_computed:
            return
        # The end token is not a part of the text.
        if tokens[-1] == problem.end_token:
            tokens = tokens[:-1]
        text = decode_tokens(tokens, context.pieces)
        device.record("text", request=number, text=text)

    decoders: dict[int, TextDecoder] = {}
    """By request, since a character may take several tokens, and tokens of other requests may come between them."""

    def decode_token(number: int, token: int) -> str:
        if token == problem.end_token:
            return ""
        decoder = decoders.setdefault(number, TextDecoder(context.pieces))
        return decoder.decode(token)

    return Service(
        problem.requests,
        concurrency=problem.workload.concurrency,
        end_token=problem.end_token,
        on_complete=record_text,
        token_text=decode_token if is_computed else None,
    )
