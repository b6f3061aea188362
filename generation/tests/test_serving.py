"""Texts are those of one process, whatever way tokens take, and whichever stage dies at whichever token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

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
from tests.helpers.worlds import events, world

TINY = Architecture(6, 32, 4, 2, 48, 64, 128)
MODEL = CostModel(TINY, "f32")
GREEDY = Sampling()
LINK = Link(rate=8e6, delay=0.02)
REQUESTS = (Request(0, (1, 2, 3, 4), 0.0, 6), Request(1, (9, 8), 0.1, 5))
SPEED = 2e6
"""A layer takes about 8 ms."""


def alone(request: Request, sampling: Sampling) -> list[int]:
    """Return the text of a request from one process with a plain loop."""
    source = Seeded(TINY, 1)
    layers = [
        LayerShard(TINY, read_layer(source, TINY, layer))
        for layer in range(TINY.layers)
    ]
    caches = [Cache() for _ in layers]
    done, fed = list(request.prompt), list(request.prompt)
    for _ in range(request.limit):
        values = embed(torch.tensor(fed), source.read(EMBEDDING))
        for layer, cache in zip(layers, caches, strict=True):
            values = layer.forward(values, cache)
        logits = score(
            values[-1:], source.read(NORM), source.read(OUTPUT), TINY.epsilon
        )[0]
        fed = [sampling.choose_token(logits, request.number, len(done))]
        done += fed
    return done[len(request.prompt) :]


def serve(
    recovery: str,
    faults: list[dict[str, Any]],
    numerics: bool = True,
    sampling: Sampling = GREEDY,
    concurrency: int = 2,
) -> tuple[Any, dict[int, list[int]]]:
    """Run the requests over a, b, c with the spare d; return the world and the tokens of each request."""
    texts: dict[int, list[int]] = {}
    seeded = Seeded(TINY, 1) if numerics else None

    def row_over(there: Any) -> Any:
        names = [name for name in "abc" if name in there] + (
            ["d"] if len(there) < 4 else []
        )
        layers = [TINY.layers // len(names)] * len(names)
        layers[-1] += TINY.layers - sum(layers)
        return tuple(zip(names, layers, strict=True))

    def program(name: str) -> Any:
        async def run(device: Any) -> None:
            links = {
                (one, other): LINK for one in "abcd" for other in "abcd" if one != other
            }
            async with Mailbox(device, links, KINDS) as mailbox:
                holder = Holder(
                    mailbox,
                    "a",
                    MODEL,
                    sampling,
                    lambda assign: seeded,
                    lambda assign: 0.0,
                )
                if name != "a":
                    await holder.serve_steps()
                mailbox.start(holder.serve_steps())
                options = RowOptions(recovery, heartbeat=0.2, patience=0.3)  # type: ignore[arg-type]
                row = Row(
                    mailbox,
                    "abcd",
                    row_over,
                    lambda name: 4,
                    options,
                    lambda name, assign: {},
                )
                await row.assign_layers()
                table = None if seeded is None else seeded.read(EMBEDDING)
                calls, embedder = (
                    StageCalls(mailbox, MODEL, 0.1),
                    Embedder(mailbox, MODEL, table),
                )
                drive: Drive = AlongRow(device, calls, row, embedder)
                if recovery == "replay":
                    drive = ThroughSource(calls, row, embedder)
                await serve_requests(
                    device,
                    drive,
                    Service(REQUESTS, concurrency, None, texts.__setitem__),
                )

        return run

    made = world({name: program(name) for name in "abcd"}, LINK, faults, speed=SPEED)
    made.run()
    return made, texts


RECOVERIES = ("restart", "replay", "replicate")


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)]
)
def test_texts_are_those_of_one_process(recovery: str, sampling: Sampling) -> None:
    _, texts = serve(recovery, [], sampling=sampling)
    assert texts == {request.number: alone(request, sampling) for request in REQUESTS}


def deaths() -> Iterator[tuple[str, int, int]]:
    for stage in "bc":
        for request in REQUESTS:
            for token in range(
                len(request.prompt) - 1, len(request.prompt) + request.limit - 1
            ):
                yield stage, request.number, token


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(("stage", "request_number", "token"), list(deaths()))
def test_texts_survive_the_death_of_each_stage_at_each_token(
    recovery: str, stage: str, request_number: int, token: int
) -> None:
    name = "prefill" if token == len(REQUESTS[request_number].prompt) - 1 else "decode"
    kill = {
        "kill": stage,
        "when": {
            "device": stage,
            "begins": name,
            "batch": request_number,
            "micro": token,
        },
    }
    made, texts = serve(recovery, [kill])
    assert texts == {request.number: alone(request, Sampling()) for request in REQUESTS}
    assert [event["phase"] for event in events(made, "recovery")] == [
        "detected",
        "resumed",
    ]
    recorded = [(event["request"], event["micro"]) for event in events(made, "token")]
    assert (
        len(recorded)
        == len(set(recorded))
        == sum(request.limit for request in REQUESTS)
    )


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_dead_stage_is_noticed_within_a_second(recovery: str) -> None:
    made, _ = serve(recovery, [{"kill": "c", "at": "300ms"}])
    (detected, _) = events(made, "recovery")
    assert detected["missing"] == ["c"]
    assert 0.3 < detected["time"] < 1.3


def test_layers_assigned_anew_replace_those_before_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders: list[Holder] = []

    class RecordedHolder(Holder):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            holders.append(self)

    monkeypatch.setattr(sys.modules[__name__], "Holder", RecordedHolder)
    serve("restart", [{"kill": "c", "at": "300ms"}])
    held = {holder._device.name: list(holder.ranges.values()) for holder in holders}
    ranges = [held[name] for name in "abd"]
    assert [len(each) for each in ranges] == [1, 1, 1]
    layers = [(each.assign.first, each.assign.last) for [each] in ranges]
    assert layers == [(0, 2), (2, 4), (4, TINY.layers)]


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_link_that_is_cut_and_healed_changes_no_text(recovery: str) -> None:
    cut = {"partition": [["a", "b", "d"], ["c"]], "at": "900ms", "for": "5s"}
    _, texts = serve(recovery, [cut])
    assert texts == {request.number: alone(request, Sampling()) for request in REQUESTS}


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_without_numerics_times_are_nearly_those_with_them(recovery: str) -> None:
    full, _ = serve(recovery, [])
    timed, texts = serve(recovery, [], numerics=False)
    assert {number: len(tokens) for number, tokens in texts.items()} == {0: 6, 1: 5}
    times = [
        [event["time"] for event in events(made, "token")] for made in (full, timed)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.02)
