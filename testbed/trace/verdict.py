"""The verdict: whether the timings of a run can be trusted, with reasons.

A run in containers is trusted if every check holds. A simulation measures nothing: its metrics are a prediction from
the values of the scenario, and only the checks of the run's end, events, rounds, faults and changes apply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from testbed.experiment import Experiment
from testbed.faults.link_actions import Flap
from testbed.trace.disturbances import Strike
from testbed.trace.events import Event
from testbed.trace.host import HostTime, added_time
from testbed.trace.log import EventLog
from testbed.trace.modelled import unmodelled_effects
from testbed.trace.outcome import Outcome
from testbed.trace.record import RunView
from testbed.trace.recovery import recovery_list
from testbed.wire.framing import CAST_BUFFER

HOST_SHARE = 0.03
"""Maximum share of the time of undisturbed steps (or requests) that the host may add.

The host adds time by late computations and messages on the critical paths of the steps (`testbed.trace.critical`). A
busy host alone is harmless: work that ends before its charged time is not late, lateness of devices off the critical
path has no effect, and pacing hides small lateness (`testbed_agent.pacing`: ``LEAD_SECONDS``, ``CATCH_UP_SECONDS``). So
the load of the host is stated as an explanation only.
"""
RECOVERY_DEFICIT_SHARE = 0.1
"""Maximum share of the time between fault and resumption added by the host to computations."""
STOLEN_SHARE = 0.03
"""Maximum share of processor time taken by a hypervisor, whose effect on single devices is unknown."""
FAULT_LATENESS = 0.5
"""Maximum seconds between the intended and the actual time of a fault or its reversal."""
CHANGE_LATENESS = 0.05
"""Maximum lateness in seconds of frequent changes: trace entries and flapping links."""
FLAP_LATENESS_SHARE = 0.5
"""Maximum lateness of a flapping link as a share of the shorter of outage and pause, if this is less than
`CHANGE_LATENESS`. Beyond, outages would be unrecognisable."""
QUEUE_OVERFLOWS = 0
"""Maximum number of packets dropped by the emulation itself. Overflow of the queue before a rate limit counts as
requested loss."""
DELAY_LATENESS = 1e-3
DELAY_LATENESS_SHARE = 0.5
"""Limit of the 99th percentile of delay-line lateness: the larger of `DELAY_LATENESS` seconds and this share of the
scenario's shortest delay. Single late packets barely affect a step, and the check of the host counts them; more late
packets make another link than the requested one."""
CLOCKS = 1e-3
"""Maximum error in seconds of the clocks of several hosts."""
MAX_NAMED = 5
"""Maximum number of missing steps, or of devices without events, named in a check."""
LOST_EVENTS = 0.01
"""Maximum share of sent messages without a recorded reception, in a run without faults."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    ok: bool | None
    """Whether the check holds; None for a remark that decides nothing."""
    detail: str
    """The measured value or the problem in half a sentence."""


def verdict(record: RunView) -> dict[str, Any]:
    """Return ``kind`` (trusted, not trusted or prediction), ``trusted``, ``summary``, ``reasons`` and ``checks``.

    The checks read these optional entries of ``outcome.fidelity``: ``host_load``, ``host_saturated`` and
    ``host_stolen`` (shares of the run), ``queues`` (packets dropped by kind, for each device), ``lateness`` (of the
    delay lines, in seconds: ``mean``, and the percentiles ``p50`` and ``p99``), ``clocks`` (maximum offset in seconds
    of each of several hosts), ``lost`` (texts about missing parts of a finished run), and ``unlimited`` (limits of
    devices that the kernel ignored).
    """
    checks = _run_checks(record)
    reasons = []
    notes = []
    for check in checks:
        if check.ok is False:
            reasons.append(check.detail)
        # Remarks of these checks concern the meaning of the metrics, so the summary names them.
        elif check.ok is None and check.name in ("model", "rounds"):
            notes.append(check.detail)
    if reasons:
        kind = "not trusted"
        texts = reasons
    elif record.outcome.runtime == "emulate":
        kind = "trusted"
        texts = ["links, pacing, faults and host were all as the scenario asks", *notes]
    else:
        kind = "prediction"
        texts = ["simulated from the scenario's values, without measurements", *notes]
    return {
        "kind": kind,
        "trusted": not reasons,
        "summary": "; ".join(texts),
        "reasons": reasons,
        "checks": [asdict(check) for check in checks],
    }


def _run_checks(record: RunView) -> list[Check]:
    outcome, experiment = record.outcome, record.experiment
    checks = [
        _check_status(outcome),
        _check_events(record),
        *_check_missed_updates(record),
        *_check_faults(experiment, record.log, record.strikes),
        *_check_changes(record.log, experiment),
    ]
    # A simulation has no host and no shaper to check.
    if outcome.runtime != "emulate":
        return [*checks, *_check_model(experiment)]
    return [
        *checks,
        _check_links(outcome, experiment),
        _check_host(record.cached(added_time), outcome.fidelity),
        *_check_recoveries(record.cached(recovery_list)),
        *_check_stolen_time(outcome.fidelity),
        *_check_queues(outcome.fidelity),
        *_check_delays(outcome.fidelity, experiment),
        *_check_clocks(outcome.fidelity),
        *_check_limits(outcome.fidelity),
    ]


def _check_clocks(fidelity: Mapping[str, Any]) -> list[Check]:
    """Check the clock offsets between hosts, which affect all times between two devices."""
    clocks: Mapping[str, float] = fidelity.get("clocks", {})
    if not clocks:
        return []
    worst = max(clocks, key=lambda host: clocks[host])
    offset = clocks[worst]
    detail = f"the clocks of {len(clocks)} hosts are known to {offset * 1e3:.2f} ms, that of {worst} the least"
    return [_bounded_check("clocks", offset, CLOCKS, detail, f"{CLOCKS * 1e3:g} ms")]


def _check_limits(fidelity: Mapping[str, Any]) -> list[Check]:
    """Check the enforcement of device limits by the kernel; the process limit is not part of the scenario."""
    unlimited: Sequence[str] = fidelity.get("unlimited", ())
    if not unlimited:
        return []
    # Only memory decides what fits on a device.
    detail = f"this kernel held no device to limits on {' and '.join(unlimited)}"
    return [Check("limits", "memory" not in unlimited, detail)]


def _bounded_check(
    name: str, value: float, maximum: float, detail: str, maximum_text: str
) -> Check:
    """Return a check for a value of at most ``maximum``; the detail of a failed check includes ``maximum_text``."""
    if value <= maximum:
        return Check(name, True, detail)
    return Check(name, False, f"{detail} (at most {maximum_text})")


def _check_model(experiment: Experiment) -> list[Check]:
    """Name the requested link properties not modelled by the simulation (see `testbed.trace.modelled`)."""
    unmodelled = unmodelled_effects(experiment)
    if not unmodelled:
        return []
    return [Check("model", None, f"not in the model: {' and '.join(unmodelled)}")]


def _check_status(outcome: Outcome) -> Check:
    if outcome.status == "finished":
        return Check("course", True, "the workload ran to its end")
    reason = f": {outcome.error}" if outcome.error else ""
    verb = "was interrupted" if outcome.status == "interrupted" else outcome.status
    return Check("course", False, f"the run {verb}{reason}")


def _name_gaps(log: EventLog, event_name: str) -> list[str]:
    """Return a text about the steps (or requests) missing in the log before later ones, if any.

    The field with the number of a step or request has the name of the event.
    """
    # A failed request is not missing.
    names = [event_name, "failed"] if event_name == "request" else [event_name]
    recorded = set()
    for (number,) in log.of(*names).rows(event_name):
        if isinstance(number, int):
            recorded.add(number)
    if not recorded or len(recorded) == max(recorded) - min(recorded) + 1:
        return []
    missing = sorted(set(range(min(recorded), max(recorded))) - recorded)
    numbers = list(map(str, missing[:MAX_NAMED]))
    if len(missing) > MAX_NAMED:
        numbers.append("...")
    plural = "s" if len(missing) > 1 else ""
    return [f"{len(missing)} {event_name}{plural} ({', '.join(numbers)})"]


def _check_events(record: RunView) -> Check:
    """Check that each device, step and message has the required events."""
    outcome, log, experiment = record.outcome, record.log, record.experiment
    silent = sorted(set(record.plan.devices) - log.devices)
    if silent:
        more = (
            f" and {len(silent) - MAX_NAMED:,} more" if len(silent) > MAX_NAMED else ""
        )
        return Check(
            "events", False, f"no events from {', '.join(silent[:MAX_NAMED])}{more}"
        )
    workload = experiment.workload
    progress = workload.progress
    if not log.of(progress):
        hint = ""
        if workload.needs_record:
            hint = f': programs report their work by device.record("{progress}", ...)'
        return Check("events", False, f"no {progress} was recorded{hint}")
    if outcome.status == "finished":
        gaps = [*_name_gaps(log, progress), *outcome.fidelity.get("lost", ())]
        if gaps:
            text = f"the run finished without {' and '.join(gaps)}"
            return Check("events", False, text)
    # A device that is killed may have acknowledged a message without recording its reception.
    if not experiment.faults and not log.of("fault"):
        sent = _count_pairs(log.of("send"), "device", "peer")
        received = _count_pairs(log.of("receive"), "peer", "device")
        missing = sum((sent - received).values())
        if missing > max(1, LOST_EVENTS * sent.total()):
            return Check(
                "events",
                False,
                f"the log lacks the reception of {missing} of {sent.total()} messages",
            )
    return Check("events", True, f"{len(log):,} events, none missing")


def _check_missed_updates(record: RunView) -> list[Check]:
    """Check for rounds without the update of a device although no fault occurred.

    If the scenario sets `round_deadline`, missed updates may be intended and are a remark only.
    """
    experiment, log = record.experiment, record.log
    is_disturbed = experiment.faults or experiment.changes or log.of("fault")
    if is_disturbed or not log.of("round"):
        return []
    count = sum(len(event.fields["devices"]) for event in log.of("missed"))
    if not count:
        return []
    plural = "s" if count > 1 else ""
    detail = f"{count} update{plural} missed the deadline of their round though no fault struck"
    if getattr(experiment.workload.method, "round_deadline", None) is not None:
        return [Check("rounds", None, detail)]
    remedy = "give a larger round_deadline or use a less loaded host"
    return [Check("rounds", False, f"{detail}: {remedy}")]


def _count_pairs(log: EventLog, *ends: str) -> Counter[Any]:
    """Return the number of messages by the values of two fields, sender and receiver."""
    pairs: Counter[Any] = Counter()
    for _, columns in log.columns(*ends):
        pairs.update(zip(*columns, strict=False))
    return pairs


def _check_faults(
    experiment: Experiment, log: EventLog, strikes: Sequence[Strike]
) -> list[Check]:
    """Check that the faults of the scenario struck and ended at the intended times."""
    planned = Counter(fault.action.name for fault in experiment.faults)
    # `strikes` may include faults by a user's commands, which the scenario does not plan.
    if not planned and not strikes:
        return []
    absent = planned - Counter(strike.action for strike in strikes)
    if absent:
        names = ", ".join(sorted(absent.elements()))
        return [Check("faults", False, f"never struck: {names}")]
    lateness = max((strike.struck - strike.intended for strike in strikes), default=0.0)
    if lateness > FAULT_LATENESS:
        worst = max(strikes, key=lambda strike: strike.struck - strike.intended)
        text = f"{worst.action} of {worst.target} struck {lateness:.2f} s late"
        return [Check("faults", False, text)]
    for event in log.of("fault"):
        fields = event.fields
        # The reversal of a kill lasts until the device has started.
        if fields.get("phase") != "undo" or fields.get("action") == "kill":
            continue
        # A fault that a user's command undid has no intended end.
        excess = event.time - float(fields.get("intended", event.time))
        if excess > FAULT_LATENESS:
            text = f"{fields['action']} of {fields['target']} lasted {excess:.2f} s longer than intended"
            return [Check("faults", False, text)]
    text = f"{len(strikes)} injected, the latest {lateness * 1e3:z.0f} ms late"
    return [Check("faults", True, text)]


def _check_changes(log: EventLog, experiment: Experiment) -> list[Check]:
    """Check the lateness of the changes by the link trace and by flapping links."""
    shortest = math.inf
    for fault in experiment.faults:
        if isinstance(fault.action, Flap):
            flap = fault.action.value
            shortest = min(shortest, flap.down, flap.up)
    max_flap_lateness = min(CHANGE_LATENESS, FLAP_LATENESS_SHARE * shortest)
    flaps = [event for event in log.of("fault") if event.fields.get("action") == "flap"]
    return [
        *_check_lateness("trace", log.of("trace"), CHANGE_LATENESS),
        *_check_lateness("flaps", flaps, max_flap_lateness),
    ]


def _check_lateness(
    name: str, events: Iterable[Event], max_lateness: float
) -> Iterator[Check]:
    lateness = []
    for event in events:
        # A change by a user's command has no intended time and cannot be late.
        if "intended" in event.fields:
            lateness.append(event.time - float(event.fields["intended"]))
    if not lateness:
        return
    late_count = sum(seconds > max_lateness for seconds in lateness)
    latest = max(lateness) * 1e3
    detail = f"{len(lateness)} changes by the {name}, the latest {latest:.0f} ms late"
    if late_count:
        detail = f"{late_count} of {detail} (at most {max_lateness * 1e3:.3g} ms)"
    yield Check(name, not late_count, detail)


def _check_links(outcome: Outcome, experiment: Experiment) -> Check:
    if not experiment.links:
        return Check("links", None, "no links")
    if not outcome.links:
        return Check("links", False, "no link was measured before the run")
    deviating = [measurement for measurement in outcome.links if measurement.problem]
    if deviating:
        first = deviating[0]
        more = f" (and {len(deviating) - 1} more)" if len(deviating) > 1 else ""
        detail = f"link {first.source} -> {first.destination} is out of tolerance: {first.problem}{more}"
        return Check("links", False, detail)
    return Check("links", True, f"{len(outcome.links)} measured, all within tolerance")


def _check_host(host_time: HostTime, fidelity: Mapping[str, Any]) -> Check:
    if host_time.seconds <= 0:
        return Check("host", None, "no step and no request was done")
    share = host_time.share
    computing = host_time.computing / host_time.seconds
    messaging = host_time.messaging / host_time.seconds
    detail = (
        f"the host added {share:.1%} to the time of steps or requests: {computing:.1%} by computing late, "
        f"{messaging:.1%} by messages later than their links make them"
    )
    check = _bounded_check("host", share, HOST_SHARE, detail, f"{HOST_SHARE:.0%}")
    if check.ok:
        return check
    return replace(check, detail=check.detail + _describe_load(fidelity))


def _describe_load(fidelity: Mapping[str, Any]) -> str:
    """Describe the host's load, which explains added time but is harmless by itself."""
    load, saturated = fidelity.get("host_load"), fidelity.get("host_saturated")
    if load is None or saturated is None:
        return ""
    return f"; its processors were busy for {load:.0%} of the time, all of them at once for {saturated:.0%}"


def _check_recoveries(recoveries: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Check the share of each recovery in ``recovery_list`` added by the host to computations."""
    shares = []
    for recovery in recoveries:
        if recovery["seconds"]:
            shares.append(recovery["deficit"] / recovery["seconds"])
    if not shares:
        return []
    share, maximum = max(shares), RECOVERY_DEFICIT_SHARE
    detail = f"computing slower than asked made up {share:.1%} of a recovery"
    return [_bounded_check("recovery", share, maximum, detail, f"{maximum:.0%}")]


def _check_stolen_time(fidelity: Mapping[str, Any]) -> list[Check]:
    stolen = fidelity.get("host_stolen")
    if stolen is None:
        return []
    detail = f"a hypervisor kept {stolen:.1%} of the processors' time for others"
    return [
        _bounded_check("stolen", stolen, STOLEN_SHARE, detail, f"{STOLEN_SHARE:.0%}")
    ]


def _check_queues(fidelity: Mapping[str, Any]) -> list[Check]:
    """Check the number of packets dropped by the emulation itself, counted by device and kind of queue."""
    queues = fidelity.get("queues")
    if queues is None:
        return []
    emulation_drops: dict[str, int] = {}
    unread: dict[str, int] = {}
    total_link_drops = 0
    for name, counts in queues.items():
        # The queue before a link's rate belongs to the link, so its drops are requested loss.
        link_drops = counts.get("sender_drops", 0)
        total_link_drops += link_drops
        unread[name] = counts.get("unread", 0)
        emulation_drops[name] = sum(counts.values()) - link_drops - unread[name]
    if any(unread.values()):
        return [_unread_datagrams_check(unread)]
    total = sum(emulation_drops.values())
    if total > QUEUE_OVERFLOWS:
        worst = max(emulation_drops, key=lambda name: emulation_drops[name])
        text = f"dropped {total} packets because the host was too slow, most at {worst}"
        return [Check("queues", False, f"the emulation {text}")]
    detail = "the emulation dropped no packet of its own"
    if total_link_drops:
        detail += f"; {total_link_drops} overflowed the queues of the links themselves"
    return [Check("queues", True, detail)]


def _unread_datagrams_check(unread: Mapping[str, int]) -> Check:
    """Return the failed check of datagrams lost at the receivers' sockets, counted by device."""
    worst = max(unread, key=lambda name: unread[name])
    detail = (
        f"the sockets of devices dropped {sum(unread.values())} datagrams before their agents could read them, "
        f"most at {worst}; raise net.core.rmem_max of the host to {CAST_BUFFER}, or give links a rate"
    )
    return Check("queues", False, detail)


def _check_delays(fidelity: Mapping[str, Any], experiment: Experiment) -> list[Check]:
    lateness = fidelity.get("lateness", {}).get("p99")
    if lateness is None:
        return []
    delays = {link.delay for link in experiment.links.values()} - {0.0}
    shortest = min(delays, default=0.0)
    limit = max(DELAY_LATENESS, DELAY_LATENESS_SHARE * shortest)
    detail = f"1% of the packets were delayed by {lateness * 1e3:.2f} ms more than asked, or later"
    return [_bounded_check("delays", lateness, limit, detail, f"{limit * 1e3:g} ms")]
