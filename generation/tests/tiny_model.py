"""A tiny model, requests for it, and their texts from one process: the reference of distributed runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from testbed.messaging.mailbox import Mailbox
from testbed.network.link import Link
from testbed_generation.architecture import Architecture
from testbed_generation.costs import CostModel
from testbed_generation.decoding import Embedder, Service, serve_requests
from testbed_generation.programs import read_embedding
from testbed_generation.requests import Request
from testbed_generation.sampling import Sampling
from testbed_generation.tensor_parallel import TensorParallelDecoder
from testbed_generation.transformer import Cache, LayerShard, embed, score
from testbed_generation.weights import (
    EMBEDDING,
    NORM,
    OUTPUT,
    SeededWeights,
    read_layer,
)

TINY = Architecture(
    layers=6, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=64, context=128
)
MODEL = CostModel(TINY, "f32")
SEED = 1
"""Seed of the weights."""
GREEDY = Sampling()
LINK = Link(rate=8e6, delay=0.02)
REQUESTS = (
    Request(number=0, prompt=(1, 2, 3, 4), arrival=0.0, limit=6),
    Request(number=1, prompt=(9, 8), arrival=0.1, limit=5),
)
SPEED = 2e6
"""FLOP/s of a device: a layer takes about 8 ms for a token."""


def full_mesh(names: str) -> dict[tuple[str, str], Link]:
    """Return links from each device to each other device."""
    links = {}
    for sender in names:
        for receiver in names:
            if sender != receiver:
                links[sender, receiver] = LINK
    return links


def generate_in_one_process(request: Request, sampling: Sampling) -> list[int]:
    """Return the tokens of a request from one process with a plain loop."""
    weights = SeededWeights(TINY, SEED)
    layers = []
    for layer in range(TINY.layers):
        layers.append(LayerShard(TINY, read_layer(weights, TINY, layer)))
    caches = [Cache() for _ in layers]
    tokens = list(request.prompt)
    inputs = list(request.prompt)
    for _ in range(request.limit):
        activations = embed(torch.tensor(inputs), weights.read(EMBEDDING))
        for layer_shard, cache in zip(layers, caches, strict=True):
            activations = layer_shard.forward(activations, cache)
        last = activations[-1:]
        norm, output = weights.read(NORM), weights.read(OUTPUT)
        logits = score(last, norm, output, TINY.epsilon)[0]
        # The caches have all earlier tokens, so the next pass needs the new token only.
        inputs = [sampling.choose_token(logits, request.number, len(tokens))]
        tokens += inputs
    return tokens[len(request.prompt) :]


def expected_texts(sampling: Sampling = GREEDY) -> dict[int, list[int]]:
    """Return the tokens of all requests from one process, by number of the request."""
    texts = {}
    for request in REQUESTS:
        texts[request.number] = generate_in_one_process(request, sampling)
    return texts


def expected_lengths() -> dict[int, int]:
    """Return the number of tokens of each text, by number of the request."""
    return {request.number: request.limit for request in REQUESTS}


def count_tokens(texts: dict[int, list[int]]) -> dict[int, int]:
    """Return the number of tokens of given texts, by number of the request."""
    return {number: len(tokens) for number, tokens in texts.items()}


async def serve_as_coordinator(
    mailbox: Mailbox,
    model: CostModel,
    *,
    receivers: Sequence[str],
    local_part: Any,
    weight_source: SeededWeights | None,
) -> dict[int, list[int]]:
    """Serve the requests by tensor parallelism; return the tokens of each request, by number."""
    texts: dict[int, list[int]] = {}
    decoder = TensorParallelDecoder(
        mailbox,
        model=model,
        receivers=receivers,
        local_part=local_part,
        embedder=Embedder(mailbox, model, read_embedding(weight_source)),
        sampling=GREEDY,
        weight_source=weight_source,
    )
    service = Service(REQUESTS, on_complete=texts.__setitem__)
    await serve_requests(mailbox.device, decoder, service)
    return texts
