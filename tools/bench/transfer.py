"""Transfer of tensors and small messages between two devices, compared with the capacity of the link."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from testbed.ml.data import load as load_data
from testbed.ml.preparation import workload_section
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.trace.events import Event
from testbed.trace.host import processor_time
from testbed.trace.record import RunView
from testbed_controller.running.emulation import emulate
from tools.bench.measurement import Measurement

WARM_UP = 5
"""Messages not measured at the beginning, while the connection is established and its window opens."""
TENSOR = 1_000_000
"""Size of the large messages in bytes."""
LEAST_SHARE = 0.9
"""Minimum share of a link's rate that large messages reach."""
MOST_OVERHEAD = 2e-3
"""Maximum time of a small message above the round trip of the link, in seconds."""


def exchange_scenario(
    payload: str, requests: int, rate: str | None, delay: str = "0"
) -> Scenario:
    """Return a scenario of messages of one size between two fast devices."""
    link = {"delay": delay} if rate is None else {"rate": rate, "delay": delay}
    return Scenario.model_validate(
        {
            "name": "bench-transfer",
            "devices": {"source": {}, "sink": {}},
            "network": {"link": link},
            "workload": {
                "task": "infer",
                "model": {"name": "mlp"},
                "method": {"name": "exchange", "payload": payload},
                "requests": requests,
            },
        }
    )


def run_exchange(scenario: Scenario) -> RunView:
    """Run a scenario in containers and return the record of the run."""
    prepared = prepare(trials(scenario)[0])
    outcome = emulate(
        prepared, load_data(workload_section(scenario).data), accept_links=True
    )
    return RunView(outcome, prepared.experiment, prepared.plan)


def _payload_events(record: RunView, kind: str, device: str) -> list[Event]:
    """Return the events of a device about payload messages."""
    events = []
    for each in record.log.of(kind):
        if each.device == device and each.fields["message"] == "payload":
            events.append(each)
    return events


def one_way_times(record: RunView) -> list[float]:
    """Return the seconds from each call of `send` to the arrival of the last byte, without the first messages."""
    sends = _payload_events(record, "send", "source")
    receptions = _payload_events(record, "receive", "sink")
    times = []
    for send, reception in zip(sends, receptions, strict=True):
        arrival = reception.fields["start"] + reception.fields["duration"]
        times.append(arrival - send.fields["start"])
    return times[WARM_UP:]


def processor_time_per_gigabit(link: str, record: RunView) -> Iterator[Measurement]:
    """Yield the processor time of a run for each gigabit of messages, without headers."""
    gigabits = 8e-9 * sum(size for (size,) in record.of("send").rows("bytes"))
    for part, seconds in (processor_time(record) or {}).items():
        if part in ("agents", "shaper"):
            yield Measurement(
                f"processor time for a gigabit over {link}, {part}",
                seconds / gigabits,
                "s",
            )


def measure() -> Iterator[Measurement]:
    """Yield the throughput of tensors, the overhead of small messages, and the processor time of large ones."""
    for rate, bits in (("100mbit", 1e8), ("1gbit", 1e9)):
        record = run_exchange(exchange_scenario("1MB", 40, rate))
        times = one_way_times(record)
        share = TENSOR * 8 / median(times) / bits
        detail = f"median of {len(times)}: {median(times) * 1e3:.2f} ms"
        yield Measurement(
            f"1 MB tensor at {rate}, share of the rate",
            share,
            "",
            LEAST_SHARE,
            at_most=False,
            detail=detail,
        )
        yield from processor_time_per_gigabit(rate, record)
    yield from processor_time_per_gigabit(
        "100mbit and 5 ms", run_exchange(exchange_scenario("1MB", 40, "100mbit", "5ms"))
    )
    record = run_exchange(exchange_scenario("1kB", 200, "100mbit", "5ms"))
    sends = _payload_events(record, "send", "source")[WARM_UP:]
    # A send lasts until the acknowledgement has arrived.
    acknowledged = median([event.fields["duration"] for event in sends])
    delays = [link.delay for link in record.outcome.links if link.delay is not None]
    # As measured in both directions, or else as requested.
    round_trip = sum(delays) if len(delays) == 2 else 10e-3
    detail = (
        f"round trip of the link {round_trip * 1e3:.2f} ms, "
        f"acknowledged message {acknowledged * 1e3:.2f} ms"
    )
    yield Measurement(
        "1 kB message above the link's round trip",
        acknowledged - round_trip,
        "s",
        MOST_OVERHEAD,
        detail=detail,
    )
