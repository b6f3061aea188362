"""Metrics of text generation.

TTFT (time to first token) is the time from the arrival of a request to its first token. TPOT (time per output token) is
the time between two later tokens of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from pydantic import ConfigDict, Field

from testbed.plan import PlanDetails
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import (
    Column,
    Metric,
    MetricsSpec,
    Row,
    Table,
    TimeSeries,
)
from testbed.trace.record import RunView


class GenerationDetails(PlanDetails):
    """Facts of a plan of any method of text generation."""

    model_config = ConfigDict(extra="forbid")
    cache: dict[str, float] = Field(default_factory=dict)
    """Bytes for the KV caches of the longest sequences by device, in the plan before any loss."""


@dataclass
class RequestTimes:
    """The times of a request's arrival and of each token, in seconds.

    >>> times = RequestTimes(request=0, arrival=1.0, prompt_length=4, token_times=[1.5, 1.75, 2.0])
    >>> times.token_gaps
    [0.25, 0.25]
    """

    request: int
    """Number of the request."""
    arrival: float
    prompt_length: int
    """Number of tokens of the prompt."""
    token_times: list[float] = field(default_factory=list)
    """Time of each generated token."""
    end: float | None = None
    """Time at which the text was complete; None for a request that did not end."""

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the arrival until the first token (TTFT)."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between successive tokens, one number less than tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


def request_times(record: RunView) -> list[RequestTimes]:
    """Return the times of all requests, ordered by number."""
    times: dict[int, RequestTimes] = {}
    for event in record.events:
        fields = event.fields
        if event.event == "arrival":
            times[fields["request"]] = RequestTimes(
                fields["request"], event.time, fields["tokens"]
            )
        elif event.event == "token":
            times[fields["request"]].token_times.append(event.time)
        elif event.event == "request" and fields["request"] in times:
            times[fields["request"]].end = event.time
    return [times[number] for number in sorted(times)]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the values lie; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    # A share of 1 would give an index beyond the last value.
    index = min(len(ordered) - 1, int(share * len(ordered)))
    return ordered[index]


def _median_ttft(record: RunView) -> float | None:
    seconds = []
    for request in request_times(record):
        # A run may end before a request has its first token.
        if request.first_seconds is not None:
            seconds.append(request.first_seconds)
    return median(seconds) if seconds else None


def _token_gaps(record: RunView) -> list[float]:
    """Return the seconds between successive tokens of all requests."""
    gaps: list[float] = []
    for request in request_times(record):
        gaps += request.token_gaps
    return gaps


def _median_tpot(record: RunView) -> float | None:
    gaps = _token_gaps(record)
    return median(gaps) if gaps else None


def _count_tokens(record: RunView) -> int:
    return sum(len(request.token_times) for request in request_times(record))


def _total_rate(record: RunView) -> float | None:
    """Return the tokens per second from the first arrival until the last token."""
    requests = [request for request in request_times(record) if request.token_times]
    if not requests:
        return None
    start = min(request.arrival for request in requests)
    end = max(request.token_times[-1] for request in requests)
    return _count_tokens(record) / (end - start) if end > start else None


def _median_request_rate(record: RunView) -> float | None:
    """Return the median over requests of the tokens per second.

    The rate of a request begins at its first token, so that the time of the prompt does not count.
    """
    rates = []
    for request in request_times(record):
        times = request.token_times
        if len(times) < 2:
            continue
        seconds = times[-1] - times[0]
        # Tokens that are accepted together from a draft have equal times.
        if seconds > 0:
            rates.append((len(times) - 1) / seconds)
    return median(rates) if rates else None


def _longest_pause(record: RunView) -> float | None:
    return max(_token_gaps(record), default=None)


def _token_bytes(record: RunView) -> float | None:
    """Return the bytes sent by all devices, divided by the number of tokens."""
    token_count = _count_tokens(record)
    if not token_count:
        return None
    sent = 0.0
    for event in record.of("send"):
        sent += event.fields["bytes"]
    return sent / token_count


def _per_token(
    device_seconds: Callable[[RunView, str], float],
) -> Callable[[RunView], dict[str, float]]:
    """Return a function for a metric of each device: the result of ``device_seconds`` divided by the number of tokens.

    ``device_seconds`` takes the run and the name of a device.
    """

    def compute(record: RunView) -> dict[str, float]:
        token_count = _count_tokens(record)
        if not token_count:
            return {}
        # All devices of the scenario: a spare has no assignment in the plan, and may replace a lost stage.
        seconds = {}
        for device in record.experiment.devices:
            seconds[device.name] = device_seconds(record, device.name) / token_count
        return seconds

    return compute


def _event_seconds(event_name: str) -> Callable[[RunView, str], float]:
    """Return a function of the run and a device, adding up the durations of the device's events ``event_name``."""

    def total_seconds(record: RunView, device: str) -> float:
        seconds = 0.0
        for event in record.of(event_name):
            if event.device == device:
                seconds += event.fields["duration"]
        return seconds

    return total_seconds


def _waiting_seconds(record: RunView, device: str) -> float:
    """Return the seconds from the first arrival to the last token in which a device neither computes nor sends."""
    first_arrival = min(event.time for event in record.of("arrival"))
    last_token = max(event.time for event in record.of("token"))
    waiting = 0.0
    busy_until = first_arrival
    busy = [*record.spans(device, "compute"), *record.spans(device, "send")]
    spans = [(float(start), float(end)) for start, end in busy]
    # A device can compute and send at the same time, so it waits from the latest end of all earlier spans on.
    for start, end in sorted(spans):
        waiting += max(0.0, min(start, last_token) - busy_until)
        busy_until = max(busy_until, end)
    return waiting + max(0.0, last_token - busy_until)


def _cache_bytes(record: RunView) -> dict[str, float]:
    """Return the bytes for KV caches by device, as planned."""
    details = record.plan.details
    return details.cache if isinstance(details, GenerationDetails) else {}


def _last_transfer(field_name: str) -> Callable[[RunView], float | None]:
    """Return a function for the bytes in field ``field_name`` of the last ``transfer``; None without such events.

    Only the dataflow ``gather`` has these events.
    """

    def compute(record: RunView) -> float | None:
        # The first transfer of a request is for its whole prompt, the last one for a single token.
        transfers = list(record.of("transfer"))
        return float(transfers[-1].fields[field_name]) if transfers else None

    return compute


def _accepted_share(record: RunView) -> float | None:
    proposed = accepted = 0
    for event in record.of("draft"):
        proposed += event.fields["proposed"]
        accepted += event.fields["accepted"]
    return accepted / proposed if proposed else None


def requests_list(record: RunView) -> list[dict[str, Any]]:
    """Return the requests with arrival, TTFT, TPOT and latency."""
    rows = []
    for request in request_times(record):
        gaps = request.token_gaps
        tpot = median(gaps) if gaps else None
        latency = None if request.end is None else request.end - request.arrival
        rows.append(
            {
                "request": request.request,
                "arrival": request.arrival,
                "prompt": request.prompt_length,
                "tokens": len(request.token_times),
                "ttft": request.first_seconds,
                "tpot": tpot,
                "latency": latency,
            }
        )
    return rows


def tokens_list(record: RunView) -> list[dict[str, Any]]:
    """Return the number of tokens over time, beginning with 0 at the first arrival."""
    requests = request_times(record)
    times: list[float] = []
    for request in requests:
        times += request.token_times
    if not times:
        return []
    first_arrival = min(request.arrival for request in requests)
    # The first row has 0 tokens, so that the chart has a linear axis that begins at 0.
    rows = []
    for count, time in enumerate([first_arrival, *sorted(times)]):
        rows.append({"time": time, "tokens": count})
    return rows


def texts_list(record: RunView) -> list[dict[str, Any]]:
    """Return the generated texts."""
    texts = []
    for event in record.of("text"):
        texts.append({"request": event.fields["request"], "text": event.fields["text"]})
    return texts


GENERATION = MetricsSpec(
    metrics=(
        Metric(
            "tokens",
            "number",
            "generated tokens",
            _count_tokens,
            brief=True,
            compared=True,
        ),
        Metric(
            "ttft",
            "seconds",
            "median time from a request's arrival to its first token",
            _median_ttft,
            brief=True,
            compared=True,
        ),
        Metric(
            "tpot",
            "seconds",
            "median time between two tokens of a request",
            _median_tpot,
            brief=True,
            compared=True,
        ),
        Metric(
            "tpot_p99",
            "seconds",
            "99th percentile of the time between two tokens of a request",
            lambda record: _quantile(_token_gaps(record), 0.99),
        ),
        Metric(
            "longest_pause",
            "seconds",
            "longest time between two tokens of a request",
            _longest_pause,
            compared=True,
        ),
        Metric(
            "token_rate",
            "number",
            "generated tokens per second of all requests together",
            _total_rate,
            brief=True,
            compared=True,
        ),
        Metric(
            "request_token_rate",
            "number",
            "tokens per second of a request after its first token, median",
            _median_request_rate,
        ),
        Metric(
            "token_bytes",
            "bytes",
            "bytes that all devices send, per token",
            _token_bytes,
            compared=True,
        ),
        Metric(
            "sent_per_token",
            "bytes",
            "bytes of activations that the coordinator sends for a decoded token, with gather",
            _last_transfer("sent"),
        ),
        Metric(
            "draft_accepted",
            "share",
            "share of the draft's tokens that the stages accepted",
            _accepted_share,
        ),
        Metric(
            "received_per_token",
            "bytes",
            "bytes of activations that the coordinator receives for a decoded token, with gather",
            _last_transfer("received"),
        ),
        Metric(
            "compute_per_token.<device>",
            "seconds",
            "time in which a device computes, per token",
            _per_token(_event_seconds("compute")),
        ),
        Metric(
            "send_per_token.<device>",
            "seconds",
            "time in which a device sends, per token",
            _per_token(_event_seconds("send")),
        ),
        Metric(
            "wait_per_token.<device>",
            "seconds",
            "time in which a device neither computes nor sends, per token",
            _per_token(_waiting_seconds),
        ),
        Metric(
            "cache_bytes.<device>",
            "bytes",
            "memory that a device reserves for the KV caches of the longest sequences",
            _cache_bytes,
        ),
    ),
    lists={
        "generation_list": requests_list,
        "token_list": tokens_list,
        "text_list": texts_list,
    },
    events=(
        EventType(
            "arrival", "a request arrived at the coordinator", (), ("request", "tokens")
        ),
        EventType(
            "token",
            "a token was chosen",
            ("batch", "micro"),
            ("request", "micro", "token", "text"),
        ),
        EventType(
            "transfer",
            "all activations of a forward pass were sent and gathered",
            ("batch",),
            ("request", "sent", "received"),
        ),
        EventType(
            "draft",
            "the stages verified tokens of the draft model",
            ("batch",),
            ("request", "proposed", "accepted"),
        ),
        EventType(
            "text", "the text of a request is complete", ("batch",), ("request", "text")
        ),
    ),
    rows=(
        Row("First token", "{ttft}", "after the arrival of a request, median"),
        Row("Time per token", "{tpot}", "median; 99th percentile {tpot_p99}"),
        Row(
            "Tokens per second",
            "{token_rate}",
            "{tokens} tokens, {token_bytes} on the network for each",
        ),
    ),
    tables=(
        Table(
            "Requests",
            "",
            "generation_list",
            (
                Column("request", "number", "request"),
                Column("arrival", "moment", "arrival"),
                Column("prompt tokens", "number", "prompt"),
                Column("tokens", "number", "tokens"),
                Column("TTFT", "seconds", "ttft"),
                Column("TPOT", "seconds", "tpot"),
                Column("latency", "seconds", "latency"),
            ),
        ),
        Table(
            "Text",
            "",
            "text_list",
            (Column("request", "number", "request"), Column("text", "text", "text")),
        ),
    ),
    curves=(
        TimeSeries(
            "Tokens", "generated tokens over time", "token_list", "tokens", "number"
        ),
    ),
)
"""Metrics, events and tables of all runs of the workload."""
