"""Metrics of text generation.

TTFT is the time from the arrival of a request to its first token, TPOT the time between two tokens of one request
after that.
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
    """Bytes for the KV caches of the longest sequences by device, of the plan before any loss."""


@dataclass
class RequestTimes:
    """The times of a request's arrival and of each of its tokens, in seconds.

    >>> RequestTimes(request=0, arrival=1.0, prompt=4, tokens=[1.5, 1.75, 2.0]).token_gaps
    [0.25, 0.25]
    """

    request: int
    arrival: float
    prompt: int
    """Number of tokens of the prompt."""
    tokens: list[float] = field(default_factory=list)
    """Time of each generated token."""
    end: float | None = None
    """Time at which the text was complete; None for a request that did not end."""

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the arrival until the first token (TTFT)."""
        return self.tokens[0] - self.arrival if self.tokens else None

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between successive tokens."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]


def request_times(record: RunView) -> list[RequestTimes]:
    """Return the times of all requests in the order of their numbers."""
    times: dict[int, RequestTimes] = {}
    for event in record.events:
        fields = event.fields
        if event.event == "arrival":
            times[fields["request"]] = RequestTimes(
                fields["request"], event.time, fields["tokens"]
            )
        elif event.event == "token":
            times[fields["request"]].tokens.append(event.time)
        elif event.event == "request" and fields["request"] in times:
            times[fields["request"]].end = event.time
    return [times[number] for number in sorted(times)]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the values lie; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    # A share of 1 would be one place beyond the last value.
    place = min(len(ordered) - 1, int(share * len(ordered)))
    return ordered[place]


def _median_ttft(record: RunView) -> float | None:
    firsts = []
    for each in request_times(record):
        # A run may end before a request has its first token.
        if each.first_seconds is not None:
            firsts.append(each.first_seconds)
    return median(firsts) if firsts else None


def _token_gaps(record: RunView) -> list[float]:
    gaps: list[float] = []
    for each in request_times(record):
        gaps += each.token_gaps
    return gaps


def _median_tpot(record: RunView) -> float | None:
    seconds = _token_gaps(record)
    return median(seconds) if seconds else None


def _count_tokens(record: RunView) -> int:
    return sum(len(each.tokens) for each in request_times(record))


def _total_rate(record: RunView) -> float | None:
    """Return the tokens a second from the first arrival until the last token."""
    times = [each for each in request_times(record) if each.tokens]
    if not times:
        return None
    begin = min(each.arrival for each in times)
    end = max(each.tokens[-1] for each in times)
    return _count_tokens(record) / (end - begin) if end > begin else None


def _median_request_rate(record: RunView) -> float | None:
    """Return the tokens a second after the first token, so that the time of the prompt does not count."""
    rates = []
    for each in request_times(record):
        if len(each.tokens) < 2:
            continue
        seconds = each.tokens[-1] - each.tokens[0]
        # Tokens accepted together from a draft have equal times.
        if seconds > 0:
            rates.append((len(each.tokens) - 1) / seconds)
    return median(rates) if rates else None


def _longest_pause(record: RunView) -> float | None:
    return max(_token_gaps(record), default=None)


def _token_bytes(record: RunView) -> float | None:
    number = _count_tokens(record)
    if not number:
        return None
    sent = 0.0
    for event in record.of("send"):
        sent += event.fields["bytes"]
    return sent / number


def _per_token(
    seconds_of: Callable[[RunView, str], float],
) -> Callable[[RunView], dict[str, float]]:
    """Return a metric for each device: the seconds of an activity divided by the number of tokens."""

    def compute(record: RunView) -> dict[str, float]:
        number = _count_tokens(record)
        if not number:
            return {}
        # All devices of the scenario: a spare has no piece of the plan, and may take over one.
        names = [device.name for device in record.experiment.devices]
        return {name: seconds_of(record, name) / number for name in names}

    return compute


def _seconds_of(event_name: str) -> Callable[[RunView, str], float]:
    """Return the function that adds up the durations of a device's events of one kind."""

    def total(record: RunView, device: str) -> float:
        seconds = 0.0
        for event in record.of(event_name):
            if event.device == device:
                seconds += event.fields["duration"]
        return seconds

    return total


def _waiting_seconds(record: RunView, device: str) -> float:
    """Return how long a device neither computes nor sends between the first arrival and the last token."""
    arrivals = [event.time for event in record.of("arrival")]
    tokens = [event.time for event in record.of("token")]
    waiting = 0.0
    busy_until = min(arrivals)
    busy = [*record.spans(device, "compute"), *record.spans(device, "send")]
    spans = [(float(start), float(end)) for start, end in busy]
    # A device computes and sends at once, so a gap begins at the latest end so far.
    for start, end in sorted(spans):
        waiting += max(0.0, min(start, max(tokens)) - busy_until)
        busy_until = max(busy_until, end)
    return waiting + max(0.0, max(tokens) - busy_until)


def _cache_bytes(record: RunView) -> dict[str, float]:
    """Return the planned room for KV caches by device."""
    details = record.plan.details
    return details.cache if isinstance(details, GenerationDetails) else {}


def _last_transfer(field_name: str) -> Callable[[RunView], float | None]:
    """Return the metric of the bytes transferred for the last token; None with other dataflows."""

    def compute(record: RunView) -> float | None:
        # Earlier transfers contain that of the prompt, which has more tokens.
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
    for each in request_times(record):
        rows.append(
            {
                "request": each.request,
                "arrival": each.arrival,
                "prompt": each.prompt,
                "tokens": len(each.tokens),
                "ttft": each.first_seconds,
                "tpot": median(each.token_gaps) if each.token_gaps else None,
                "latency": None if each.end is None else each.end - each.arrival,
            }
        )
    return rows


def tokens_list(record: RunView) -> list[dict[str, Any]]:
    """Return the number of tokens over time, from none at the first arrival on."""
    requests = request_times(record)
    times: list[float] = []
    for request in requests:
        times += request.tokens
    if not times:
        return []
    first_arrival = min(request.arrival for request in requests)
    # From 0 on, so that the axis of the chart is linear.
    return [
        {"time": time, "tokens": number}
        for number, time in enumerate([first_arrival, *sorted(times)])
    ]


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
            "99th percentile of that time",
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
            "generated tokens a second, of all requests together",
            _total_rate,
            brief=True,
            compared=True,
        ),
        Metric(
            "request_token_rate",
            "number",
            "median of the tokens a second of each request",
            _median_request_rate,
        ),
        Metric(
            "token_bytes",
            "bytes",
            "bytes that all devices send for a token",
            _token_bytes,
            compared=True,
        ),
        Metric(
            "sent_per_token",
            "bytes",
            "values that the source sends for a decoded token, with gather",
            _last_transfer("sent"),
        ),
        Metric(
            "draft_accepted",
            "share",
            "share of the draft's tokens that the stages chose as well",
            _accepted_share,
        ),
        Metric(
            "received_per_token",
            "bytes",
            "values that it receives",
            _last_transfer("received"),
        ),
        Metric(
            "compute_per_token.<device>",
            "seconds",
            "time that a device computes for a token",
            _per_token(_seconds_of("compute")),
        ),
        Metric(
            "send_per_token.<device>",
            "seconds",
            "time that a device sends for a token",
            _per_token(_seconds_of("send")),
        ),
        Metric(
            "wait_per_token.<device>",
            "seconds",
            "time that a device neither computes nor sends for a token",
            _per_token(_waiting_seconds),
        ),
        Metric(
            "cache_bytes.<device>",
            "bytes",
            "room that a device keeps for the KV caches of the longest sequences",
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
            "arrival", "a request arrived at the source", (), ("request", "tokens")
        ),
        EventType(
            "token",
            "a token was chosen",
            ("batch", "micro"),
            ("request", "micro", "token", "text"),
        ),
        EventType(
            "transfer",
            "all values of a token were sent and gathered",
            ("batch",),
            ("request", "sent", "received"),
        ),
        EventType(
            "draft",
            "the stages have verified tokens of the draft model",
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
