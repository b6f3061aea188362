"""The verdict: whether the timings of a run can be trusted, with reasons.

A run on containers is trusted if every check holds. A simulation measures nothing: its metrics are a prediction from
the values of the scenario, and only the checks of the run's course apply.
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
"""Maximum share of the time of undisturbed steps (or requests) added by the host; above, the host sets the pace.

Only damage counts: lateness of computations and messages on the steps' critical paths (``testbed.trace.critical``). A
busy host is harmless by itself: paced devices leave the host idle most of the time, work finished before its due time
is not late, lateness of devices off the critical path has no effect, and pacing hides small lateness
(``testbed_agent.pacing``: ``LEAD_SECONDS``, ``CATCH_UP_SECONDS``). The host's load serves as an explanation only.
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
"""Maximum lateness of a flap as a share of its shorter phase, if lower: above, outages would be unrecognisable."""
QUEUE_OVERFLOWS = 0
"""Maximum number of packets dropped by the emulation itself. Overflow of the queue before a rate limit counts as
requested loss."""
DELAY_LATENESS = 1e-3
DELAY_LATENESS_SHARE = 0.5
"""Limit of the 99th percentile of delay-line lateness: the larger of one millisecond and this share of the scenario's
shortest delay. Single late packets barely affect a step and are counted above, but a longer tail invalidates the
requested link."""
CLOCKS = 1e-3
"""Seconds by which clocks of several hosts may be off."""
MAX_NAMED = 5
"""Maximum number of missing steps, or of devices without events, named in a check."""
LOST_EVENTS = 0.01
"""Maximum share of sent messages without a recorded reception not explained by a fault."""


@dataclass(frozen=True)
class Check:
    """Result of one check; ``ok`` is None for an inapplicable check."""

    name: str
    ok: bool | None
    detail: str


def verdict(record: RunView) -> dict[str, Any]:
    """Return ``kind`` (trusted, not trusted or prediction), ``trusted``, ``summary``, ``reasons`` and ``checks``.

    The checks read these optional entries of ``outcome.fidelity``: ``host_load``, ``host_saturated`` and
    ``host_stolen`` (shares of the run), ``queues`` (packets dropped by kind, for each device), ``lateness`` (of the
    delay lines, in seconds: ``mean``, and the percentiles ``p50`` and ``p99``), ``clocks`` (maximum offset in seconds
    of each of several hosts), ``lost`` (texts about missing parts of a finished run), and ``unlimited`` (limits of
    devices that the kernel ignored).
    """
    outcome, experiment = record.outcome, record.experiment
    checks = [
        _check_course(outcome),
        _check_record(record),
        *_missed_updates(record),
        *_check_faults(experiment, record.log, record.strikes),
        *_check_changes(record.log, experiment),
    ]
    is_emulated = outcome.runtime == "emulate"
    # These measure the host and the shaper, which a simulation does not have.
    if is_emulated:
        checks += [
            _check_links(outcome, experiment),
            _check_host(record.cached(added_time), outcome.fidelity),
            *_check_recoveries(record.cached(recovery_list)),
            *_check_stolen_time(outcome.fidelity),
            *_check_queues(outcome.fidelity),
            *_check_delays(outcome.fidelity, experiment),
            *_check_clocks(outcome.fidelity),
            *_check_limits(outcome.fidelity),
        ]
    else:
        checks += _check_model(experiment)
    reasons = []
    notes = []
    for check in checks:
        if check.ok is False:
            reasons.append(check.detail)
        # Both concern the meaning of the metrics, so the summary names them although they are no objection.
        elif check.ok is None and check.name in ("model", "rounds"):
            notes.append(check.detail)
    if reasons:
        kind = "not trusted"
        texts = reasons
    elif is_emulated:
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
    name: str, value: float, most: float, detail: str, limit: str
) -> Check:
    """Return a check of a value against a bound, which is named in the detail on failure."""
    if value <= most:
        return Check(name, True, detail)
    return Check(name, False, f"{detail} (at most {limit})")


def _check_model(experiment: Experiment) -> list[Check]:
    """Name the requested link properties not modelled by the simulation (see `testbed.trace.modelled`)."""
    unmodelled = unmodelled_effects(experiment)
    if not unmodelled:
        return []
    return [Check("model", None, f"not in the model: {' and '.join(unmodelled)}")]


def _check_course(outcome: Outcome) -> Check:
    if outcome.status == "finished":
        return Check("course", True, "the workload ran to its end")
    why = f": {outcome.error}" if outcome.error else ""
    verb = "was interrupted" if outcome.status == "interrupted" else outcome.status
    return Check("course", False, f"the run {verb}{why}")


def _name_gaps(log: EventLog, event_name: str) -> list[str]:
    """Name steps (or requests) missing from the log before later ones."""
    # A request that was given up is not missing.
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


def _check_record(record: RunView) -> Check:
    """Check the log for missing mandatory events."""
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
    wanted = workload.progress
    if not log.of(wanted):
        hint = ""
        if workload.needs_record:
            hint = f': programs report their work by device.record("{wanted}", ...)'
        return Check("events", False, f"no {wanted} was recorded{hint}")
    if outcome.status == "finished":
        lost = [*_name_gaps(log, wanted), *outcome.fidelity.get("lost", ())]
        if lost:
            text = f"the run finished without {' and '.join(lost)}"
            return Check("events", False, text)
    # A fault may lose a reception whose acknowledgement was sent.
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


def _missed_updates(record: RunView) -> list[Check]:
    """Check for rounds that ended without a device although no fault occurred; `round_deadline` requires this."""
    experiment, log = record.experiment, record.log
    is_disturbed = experiment.faults or experiment.changes or log.of("fault")
    if is_disturbed or not log.of("round"):
        return []
    late = sum(len(event.fields["devices"]) for event in log.of("missed"))
    if not late:
        return []
    plural = "s" if late > 1 else ""
    detail = f"{late} update{plural} missed the deadline of their round though no fault struck"
    # A deadline in the scenario may be meant to cut slow devices off; the default one is not.
    if getattr(experiment.workload.method, "round_deadline", None) is not None:
        return [Check("rounds", None, detail)]
    remedy = "give a larger round_deadline or use a less loaded host"
    return [Check("rounds", False, f"{detail}: {remedy}")]


def _count_pairs(log: EventLog, *ends: str) -> Counter[Any]:
    """Return the number of messages between each two devices."""
    pairs: Counter[Any] = Counter()
    for _, columns in log.columns(*ends):
        pairs.update(zip(*columns, strict=False))
    return pairs


def _check_faults(
    experiment: Experiment, log: EventLog, struck: Sequence[Strike]
) -> list[Check]:
    wanted = Counter(fault.action.name for fault in experiment.faults)
    # Faults by hand strike as well, but no number of them is wanted.
    if not wanted and not struck:
        return []
    absent = wanted - Counter(strike.action for strike in struck)
    if absent:
        names = ", ".join(sorted(absent.elements()))
        return [Check("faults", False, f"never struck: {names}")]
    late = max((strike.struck - strike.intended for strike in struck), default=0.0)
    if late > FAULT_LATENESS:
        worst = max(struck, key=lambda strike: strike.struck - strike.intended)
        text = f"{worst.action} of {worst.target} struck {late:.2f} s late"
        return [Check("faults", False, text)]
    for event in log.of("fault"):
        fields = event.fields
        # A device that was killed takes its time to start.
        if fields.get("phase") != "undo" or fields.get("action") == "kill":
            continue
        # A fault that was undone by hand has no intended end.
        beyond = event.time - float(fields.get("intended", event.time))
        if beyond > FAULT_LATENESS:
            text = f"{fields['action']} of {fields['target']} lasted {beyond:.2f} s longer than intended"
            return [Check("faults", False, text)]
    text = f"{len(struck)} injected, the latest {late * 1e3:z.0f} ms late"
    return [Check("faults", True, text)]


def _check_changes(log: EventLog, experiment: Experiment) -> list[Check]:
    """Check the lateness of link trace entries and of flapping links."""
    shortest = math.inf
    for fault in experiment.faults:
        if isinstance(fault.action, Flap):
            flap = fault.action.value
            shortest = min(shortest, flap.down, flap.up)
    flap_bound = min(CHANGE_LATENESS, FLAP_LATENESS_SHARE * shortest)
    flaps = [event for event in log.of("fault") if event.fields.get("action") == "flap"]
    return [
        *_bound_changes("trace", log.of("trace"), CHANGE_LATENESS),
        *_bound_changes("flaps", flaps, flap_bound),
    ]


def _bound_changes(name: str, events: Iterable[Event], bound: float) -> Iterator[Check]:
    late = []
    for event in events:
        # A change by hand has no intended time and cannot be late.
        if "intended" in event.fields:
            late.append(event.time - float(event.fields["intended"]))
    if not late:
        return
    beyond = sum(seconds > bound for seconds in late)
    detail = (
        f"{len(late)} changes by the {name}, the latest {max(late) * 1e3:.0f} ms late"
    )
    if beyond:
        detail = f"{beyond} of {detail} (at most {bound * 1e3:.3g} ms)"
    yield Check(name, not beyond, detail)


def _check_links(outcome: Outcome, experiment: Experiment) -> Check:
    if not experiment.links:
        return Check("links", None, "no links")
    if not outcome.links:
        return Check("links", False, "no link was measured before the run")
    bad = [item for item in outcome.links if item.problem]
    if bad:
        first = bad[0]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
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
    """Describe the host's load, which explains damage but is harmless by itself."""
    load, saturated = fidelity.get("host_load"), fidelity.get("host_saturated")
    if load is None or saturated is None:
        return ""
    return f"; its processors were busy for {load:.0%} of the time, all of them at once for {saturated:.0%}"


def _check_recoveries(recovered: Sequence[Mapping[str, Any]]) -> list[Check]:
    done = [item for item in recovered if item["seconds"]]
    if not done:
        return []
    worst = max(done, key=lambda item: float(item["deficit"] / item["seconds"]))
    part = worst["deficit"] / worst["seconds"]
    most = RECOVERY_DEFICIT_SHARE
    detail = f"computing slower than asked made up {part:.1%} of a recovery"
    return [_bounded_check("recovery", part, most, detail, f"{most:.0%}")]


def _check_stolen_time(fidelity: Mapping[str, Any]) -> list[Check]:
    stolen = fidelity.get("host_stolen")
    if stolen is None:
        return []
    detail = f"a hypervisor kept {stolen:.1%} of the processors' time for others"
    return [
        _bounded_check("stolen", stolen, STOLEN_SHARE, detail, f"{STOLEN_SHARE:.0%}")
    ]


def _check_queues(fidelity: Mapping[str, Any]) -> list[Check]:
    queues = fidelity.get("queues")
    if queues is None:
        return []
    lost: dict[str, int] = {}
    unread: dict[str, int] = {}
    link = 0
    for name, counts in queues.items():
        # The queue before a link's rate belongs to the link: its drops are requested loss.
        own_drops = counts.get("sender_drops", 0)
        link += own_drops
        unread[name] = counts.get("unread", 0)
        lost[name] = sum(counts.values()) - own_drops - unread[name]
    if any(unread.values()):
        return [_unread_datagrams(unread)]
    total = sum(lost.values())
    if total > QUEUE_OVERFLOWS:
        worst = max(lost, key=lambda name: lost[name])
        text = f"dropped {total} packets because the host was too slow, most at {worst}"
        return [Check("queues", False, f"the emulation {text}")]
    own = f"; {link} overflowed the queues of the links themselves" if link else ""
    return [Check("queues", True, f"the emulation dropped no packet of its own{own}")]


def _unread_datagrams(unread: Mapping[str, int]) -> Check:
    """Return the failed check of datagrams, counted by device, that overflowed the receivers' sockets."""
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
