"""Texts over a row of stages equal those of one process, also if a stage other than the source dies at any token.

Texts are compared as tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any, Literal

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.network.link import Link
from testbed_generation.architecture import Architecture
from testbed_generation.costs import CostModel
from testbed_generation.messages import KINDS
from testbed_generation.network import Cache, LayerShard, embed, score
from testbed_generation.requests import Request
from testbed_generation.row import Row, RowOptions
from testbed_generation.sampling import Sampling
from testbed_generation.source import (
    AlongRow,
    Drive,
    Embedder,
    Service,
    StageCalls,
    ThroughSource,
    serve_requests,
)
from testbed_generation.stage import Holder
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, Seeded, read_layer
from tests.helpers.worlds import events_of, make_world

Recovery = Literal["restart", "replay", "replicate"]
RECOVERIES: tuple[Recovery, ...] = ("restart", "replay", "replicate")
TINY = Architecture(
    layers=6, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=64, context=128
)
MODEL = CostModel(TINY, "f32")
GREEDY = Sampling()
LINK = Link(rate=8e6, delay=0.02)
REQUESTS = (
    Request(number=0, prompt=(1, 2, 3, 4), arrival=0.0, limit=6),
    Request(number=1, prompt=(9, 8), arrival=0.1, limit=5),
)
SPEED = 2e6
"""FLOP/s: a layer takes about 8 ms for a token."""


def generate_in_one_process(request: Request, sampling: Sampling) -> list[int]:
    """Return the tokens of a request from one process with a plain loop."""
    weights = Seeded(TINY, 1)
    layers = [
        LayerShard(TINY, read_layer(weights, TINY, layer))
        for layer in range(TINY.layers)
    ]
    caches = [Cache() for _ in layers]
    tokens = list(request.prompt)
    inputs = list(request.prompt)
    for _ in range(request.limit):
        values = embed(torch.tensor(inputs), weights.read(EMBEDDING))
        for layer, cache in zip(layers, caches, strict=True):
            values = layer.forward(values, cache)
        last = values[-1:]
        norm, output = weights.read(NORM), weights.read(OUTPUT)
        logits = score(last, norm, output, TINY.epsilon)[0]
        inputs = [sampling.choose_token(logits, request.number, len(tokens))]
        tokens += inputs
    return tokens[len(request.prompt) :]


def expected_texts(sampling: Sampling = GREEDY) -> dict[int, list[int]]:
    """Return the tokens of all requests from one process, by number."""
    texts = {}
    for request in REQUESTS:
        texts[request.number] = generate_in_one_process(request, sampling)
    return texts


def plan_row(alive: Collection[str]) -> tuple[tuple[str, int], ...]:
    """Return the stages with their numbers of layers; the spare joins as soon as another device is missing."""
    names = [name for name in "abc" if name in alive]
    if len(names) < 3 and "d" in alive:
        names.append("d")
    layers = [TINY.layers // len(names)] * len(names)
    layers[-1] += TINY.layers - sum(layers)
    return tuple(zip(names, layers, strict=True))


def serve(
    recovery: Recovery,
    faults: list[dict[str, Any]],
    numerics: bool = True,
    sampling: Sampling = GREEDY,
) -> tuple[Any, dict[int, list[int]]]:
    """Run the requests over stages a, which is the source, b and c, with the spare d.

    Return the simulated world and the tokens of each request.
    """
    texts: dict[int, list[int]] = {}
    seeded = Seeded(TINY, 1) if numerics else None
    links = {(one, other): LINK for one in "abcd" for other in "abcd" if one != other}

    def program(name: str) -> Any:
        async def run(device: Any) -> None:
            async with Mailbox(device, links, KINDS) as mailbox:
                holder = Holder(
                    mailbox,
                    "a",
                    MODEL,
                    sampling,
                    weights=lambda assign: seeded,
                    load_seconds=lambda assign: 0.0,
                )
                if name != "a":
                    # Until the end of the run.
                    await holder.serve_steps()
                    return
                mailbox.start(holder.serve_steps())
                row = Row(
                    mailbox,
                    "abcd",
                    plan_row,
                    room=lambda name: 4,
                    options=RowOptions(recovery, heartbeat=0.2, patience=0.3),
                    weights=lambda name, assign: {},
                )
                await row.assign_layers()
                table = None if seeded is None else seeded.read(EMBEDDING)
                calls = StageCalls(mailbox, MODEL, heartbeat=0.1)
                embedder = Embedder(mailbox, MODEL, table)
                drive: Drive = AlongRow(device, calls, row, embedder)
                if recovery == "replay":
                    # A replacement receives the inputs of the lost stage, which only this drive keeps.
                    drive = ThroughSource(calls, row, embedder)
                service = Service(REQUESTS, concurrency=2, complete=texts.__setitem__)
                await serve_requests(device, drive, service)

        return run

    programs = {name: program(name) for name in "abcd"}
    simulated = make_world(programs, LINK, faults, speed=SPEED)
    simulated.run()
    return simulated, texts


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=3)]
)
def test_texts_are_those_of_one_process(recovery: Recovery, sampling: Sampling) -> None:
    _, texts = serve(recovery, [], sampling=sampling)
    assert texts == expected_texts(sampling)


def deaths() -> Iterator[tuple[str, int, int]]:
    """Yield stage, request and position of the last input token, for each forward pass of all stages but the source."""
    for stage in "bc":
        for request in REQUESTS:
            first = len(request.prompt) - 1
            for position in range(first, first + request.limit):
                yield stage, request.number, position


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(("stage", "request_number", "position"), list(deaths()))
def test_texts_survive_the_death_of_a_stage_at_each_token(
    recovery: Recovery, stage: str, request_number: int, position: int
) -> None:
    is_prompt = position == len(REQUESTS[request_number].prompt) - 1
    # Spans number requests as batches and tokens as micro-batches.
    span = {
        "device": stage,
        "begins": "prefill" if is_prompt else "decode",
        "batch": request_number,
        "micro": position,
    }
    simulated, texts = serve(recovery, [{"kill": stage, "when": span}])
    assert texts == expected_texts()
    phases = [event["phase"] for event in events_of(simulated, "recovery")]
    assert phases == ["detected", "resumed"]
    recorded = []
    for event in events_of(simulated, "token"):
        recorded.append((event["request"], event["micro"]))
    assert len(recorded) == len(set(recorded)), "no token is recorded twice"
    assert len(recorded) == sum(request.limit for request in REQUESTS)


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_dead_stage_is_noticed_within_a_second(recovery: Recovery) -> None:
    simulated, _ = serve(recovery, [{"kill": "c", "at": "300ms"}])
    (detected, _) = events_of(simulated, "recovery")
    assert detected["missing"] == ["c"]
    assert 0.3 < detected["time"] < 1.3


def test_layers_assigned_anew_replace_those_before_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders: list[Holder] = []

    class RecordedHolder(Holder):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            holders.append(self)

    monkeypatch.setattr(sys.modules[__name__], "Holder", RecordedHolder)
    serve("restart", [{"kill": "c", "at": "300ms"}])
    held = {holder._device.name: list(holder.ranges.values()) for holder in holders}
    ranges = [held[name] for name in "abd"]
    assert [len(each) for each in ranges] == [1, 1, 1]
    layers = [(each.assign.first, each.assign.last) for [each] in ranges]
    assert layers == [(0, 2), (2, 4), (4, TINY.layers)]


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_partition_that_heals_changes_no_text(recovery: Recovery) -> None:
    # While both requests generate, and longer than the rest of a run without faults.
    cut = {"partition": [["a", "b", "d"], ["c"]], "at": "500ms", "for": "5s"}
    simulated, texts = serve(recovery, [cut])
    assert texts == expected_texts()
    (detected, _) = events_of(simulated, "recovery")
    assert detected["missing"] == ["c"]
    for request in REQUESTS:
        times = []
        for event in events_of(simulated, "token"):
            if event["request"] == request.number:
                times.append(event["time"])
        assert times[0] < 0.5 < times[-1]


def test_a_missing_spare_gets_no_layers() -> None:
    simulated, texts = serve("restart", [{"kill": "d", "at": "0s"}])
    assert texts == expected_texts()
    assert plan_row("abc") == (("a", 2), ("b", 2), ("c", 2))
    assert not events_of(simulated, "recovery")


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_without_numerics_times_are_nearly_those_with_them(recovery: Recovery) -> None:
    full, _ = serve(recovery, [])
    timed, texts = serve(recovery, [], numerics=False)
    lengths = {number: len(tokens) for number, tokens in texts.items()}
    assert lengths == {request.number: request.limit for request in REQUESTS}
    times_with = [event["time"] for event in events_of(full, "token")]
    times_without = [event["time"] for event in events_of(timed, "token")]
    # Messages without values are padded by the size of the values, but not by that of a tensor's header.
    assert times_without == pytest.approx(times_with, rel=0.02)
