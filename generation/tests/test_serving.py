"""Pipelines of stages generate the texts of one process, also if a stage other than the coordinator dies at any token.

Texts are compared as tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any, Literal

import pytest
from tiny_model import (
    GREEDY,
    LINK,
    MODEL,
    REQUESTS,
    SEED,
    SPEED,
    TINY,
    count_tokens,
    expected_lengths,
    expected_texts,
    full_mesh,
)

from testbed.messaging.mailbox import Mailbox
from testbed_generation.decoding import (
    Decoder,
    Embedder,
    ForwardingDecoder,
    RelayingDecoder,
    Service,
    StageClient,
    serve_requests,
)
from testbed_generation.messages import KINDS
from testbed_generation.pipeline import Pipeline, PipelineOptions
from testbed_generation.programs import read_embedding
from testbed_generation.sampling import Sampling
from testbed_generation.stage import StageServer
from testbed_generation.weights import SeededWeights
from tests.helpers.worlds import events_of, make_world

Recovery = Literal["restart", "replay", "replicate"]
RECOVERIES: tuple[Recovery, ...] = ("restart", "replay", "replicate")


def divide_layers(reachable: Collection[str]) -> tuple[tuple[str, int], ...]:
    """Return the stages with their numbers of layers; the spare d replaces a device that is missing."""
    names = [name for name in "abc" if name in reachable]
    if len(names) < 3 and "d" in reachable:
        names.append("d")
    counts = [TINY.layers // len(names)] * len(names)
    counts[-1] += TINY.layers - sum(counts)
    return tuple(zip(names, counts, strict=True))


def serve(
    recovery: Recovery,
    faults: list[dict[str, Any]],
    *,
    numerics: bool = True,
    sampling: Sampling = GREEDY,
) -> tuple[Any, dict[int, list[int]]]:
    """Serve the requests on a pipeline of a, which is the coordinator, b and c, with the spare d.

    Return the world world and the tokens of each request.
    """
    texts: dict[int, list[int]] = {}
    weight_source = SeededWeights(TINY, SEED) if numerics else None
    links = full_mesh("abcd")

    def make_program(name: str) -> Any:
        async def program(device: Any) -> None:
            async with Mailbox(device, links, KINDS) as mailbox:
                server = StageServer(
                    mailbox,
                    coordinator="a",
                    model=MODEL,
                    sampling=sampling,
                    weight_source_for=lambda assign: weight_source,
                    load_seconds=lambda assign: 0.0,
                )
                if name != "a":
                    # Never returns: the end of the run cancels this program.
                    await server.serve_steps()
                    return
                mailbox.start(server.serve_steps())
                pipeline = Pipeline(
                    mailbox,
                    devices="abcd",
                    divide_layers=divide_layers,
                    layer_capacity=lambda name: 4,
                    options=PipelineOptions(
                        recovery, heartbeat=0.2, failure_timeout=0.3
                    ),
                    weights_to_send=lambda name, assign: {},
                )
                await pipeline.assign_layers()
                embedder = Embedder(mailbox, MODEL, read_embedding(weight_source))
                client = StageClient(mailbox, MODEL, heartbeat=0.1)
                decoder: Decoder = ForwardingDecoder(device, client, pipeline, embedder)
                if recovery == "replay":
                    # A replacement receives the inputs of the lost stage, which only this decoder keeps.
                    decoder = RelayingDecoder(client, pipeline, embedder)
                service = Service(
                    REQUESTS, concurrency=2, on_complete=texts.__setitem__
                )
                await serve_requests(device, decoder, service)

        return program

    programs = {name: make_program(name) for name in "abcd"}
    world = make_world(programs, LINK, faults, speed=SPEED)
    world.run()
    return world, texts


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=3)],
    ids=["greedy", "nucleus"],
)
def test_texts_equal_those_of_one_process(
    recovery: Recovery, sampling: Sampling
) -> None:
    _, texts = serve(recovery, [], sampling=sampling)
    assert texts == expected_texts(sampling)


def forward_passes() -> Iterator[tuple[str, int, int]]:
    """Yield stage, request and position of the last input token for each forward pass of stages b and c."""
    for stage in "bc":
        for request in REQUESTS:
            # The first pass ends with the last token of the prompt, each later pass with one more token.
            first = len(request.prompt) - 1
            for position in range(first, first + request.limit):
                yield stage, request.number, position


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(
    ("stage", "request_number", "position"), list(forward_passes())
)
def test_texts_do_not_change_if_stage_dies_at_any_token(
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
    world, texts = serve(recovery, [{"kill": stage, "when": span}])
    assert texts == expected_texts()
    phases = [event["phase"] for event in events_of(world, "recovery")]
    assert phases == ["detected", "resumed"]
    recorded = []
    for event in events_of(world, "token"):
        recorded.append((event["request"], event["micro"]))
    assert len(recorded) == len(set(recorded)), "no token is recorded twice"
    assert len(recorded) == sum(request.limit for request in REQUESTS)


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_dead_stage_is_detected_within_a_second(recovery: Recovery) -> None:
    world, _ = serve(recovery, [{"kill": "c", "at": "300ms"}])
    (detected, _) = events_of(world, "recovery")
    assert detected["missing"] == ["c"]
    # A heartbeat of 0.2 s, a timeout of 0.3 s, and messages of less than 0.5 s.
    assert 0.3 < detected["time"] < 1.3


def test_restart_replaces_earlier_assignments_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: dict[str, StageServer] = {}

    class RecordedServer(StageServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            servers[self._device.name] = self

    monkeypatch.setattr(sys.modules[__name__], "StageServer", RecordedServer)
    serve("restart", [{"kill": "c", "at": "300ms"}])
    layers = []
    for name in "abd":
        # A device without its earlier assignments has a single range.
        [layer_range] = servers[name].ranges.values()
        layers.append((layer_range.assign.first, layer_range.assign.last))
    assert layers == [(0, 2), (2, 4), (4, TINY.layers)]


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_network_partition_of_stage_does_not_change_texts(recovery: Recovery) -> None:
    # The partition begins while both requests generate, and lasts longer than the rest of a run without faults.
    cut = {"partition": [["a", "b", "d"], ["c"]], "at": "500ms", "for": "5s"}
    world, texts = serve(recovery, [cut])
    assert texts == expected_texts()
    (detected, _) = events_of(world, "recovery")
    assert detected["missing"] == ["c"]
    for request in REQUESTS:
        times = []
        for event in events_of(world, "token"):
            if event["request"] == request.number:
                times.append(event["time"])
        # Otherwise the partition, at 0.5 s, would not have met this request.
        assert times[0] < 0.5 < times[-1]


def test_dead_spare_gets_no_layers() -> None:
    world, texts = serve("restart", [{"kill": "d", "at": "0s"}])
    assert texts == expected_texts()
    assert divide_layers("abc") == (("a", 2), ("b", 2), ("c", 2))
    assert not events_of(world, "recovery")


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_times_without_numerics_nearly_equal_those_with_numerics(
    recovery: Recovery,
) -> None:
    full, _ = serve(recovery, [])
    timed, texts = serve(recovery, [], numerics=False)
    assert count_tokens(texts) == expected_lengths()
    times_with = [event["time"] for event in events_of(full, "token")]
    times_without = [event["time"] for event in events_of(timed, "token")]
    # Messages without activations are padded by the size of the activations, but not by that of a tensor's header.
    assert times_without == pytest.approx(times_with, rel=0.02)
