"""Whether the timings of a run can be trusted, and why not.

A run on containers is trusted when every check holds. A simulation measures nothing: its figures are a prediction
from the scenario's own figures, and only the checks on the run's course apply to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.methods.base import Plan
from testbed.network.link import Pair
from testbed.scenario.experiment import Experiment
from testbed.trace.disturbances import Strike
from testbed.trace.outcome import Outcome

DEFICIT_SHARE = 0.05
"""Of the undisturbed steps' (requests') time: beyond it the host, not the scenario, set a device's pace."""
RECOVERY_DEFICIT_SHARE = 0.1
"""Of a recovery: the same for what the devices compute between the strike and the resumption."""
HOST_SATURATED_SHARE = 0.5
"""Of the run: with all processors busy for longer, messages wait for the host and not for their link."""
FAULT_LATENESS = 0.5
"""Seconds after its intended instant within which a fault must strike."""
QUEUE_OVERFLOWS = 0
"""Packets that the emulation itself, not the scenario, may drop."""
DELAY_LATENESS = 1e-3
"""Seconds beyond the requested delay that the delay line may add at its 99th percentile."""
LOST_EVENTS = 0.01
"""Share of the messages sent whose reception may be missing from the log without a fault to explain it."""


@dataclass(frozen=True)
class Check:
    """One thing looked at: ``ok`` is None where there was nothing to look at."""

    name: str
    ok: bool | None
    detail: str


def verdict(
    outcome: Outcome,
    experiment: Experiment,
    plan: Plan,
    devices: Mapping[str, Mapping[str, Any]],
    struck: Sequence[Strike],
    recovered: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return ``kind`` (trusted, not trusted or prediction), ``trusted``, ``summary``, ``reasons`` and ``checks``.

    ``devices`` and ``recovered`` are tables of ``testbed.trace.metrics``. Of ``outcome.fidelity`` these figures are
    understood, each optional: ``host_saturated`` (share of the run), ``queues`` (per device, packets dropped by kind)
    and ``lateness`` (of the delay lines, seconds by percentile: ``p99``).
    """
    checks = [_course(outcome), _record(outcome, experiment, plan), *_faults(experiment, struck)]
    emulated = outcome.runtime == "emulate"
    if emulated:
        checks += [_links(outcome, experiment), _pacing(devices), *_recoveries(recovered), *_host(outcome.fidelity)]
    reasons = [check.detail for check in checks if check.ok is False]
    if reasons:
        kind, summary = "not trusted", "; ".join(reasons)
    elif emulated:
        kind, summary = "trusted", "links, pacing, faults and host were all as the scenario asks"
    else:
        kind, summary = "prediction", "simulated from the scenario's figures; nothing was measured"
    return {
        "kind": kind,
        "trusted": not reasons,
        "summary": summary,
        "reasons": reasons,
        "checks": [asdict(check) for check in checks],
    }


def _course(outcome: Outcome) -> Check:
    if outcome.status == "finished":
        return Check("course", True, "the workload ran to its end")
    why = f": {outcome.error}" if outcome.error else ""
    verb = "was interrupted" if outcome.status == "interrupted" else outcome.status
    return Check("course", False, f"the run {verb}{why}")


def _record(outcome: Outcome, experiment: Experiment, plan: Plan) -> Check:
    """Look for what must be in the log and is not."""
    wrote = {event.device for event in outcome.events}
    silent = sorted({assignment.device for assignment in plan.assignments} - wrote)
    if silent:
        return Check("events", False, f"no events from {', '.join(silent)}")
    wanted = "step" if experiment.scenario.workload.task == "train" else "request"
    if not any(event.event == wanted for event in outcome.events):
        return Check("events", False, f"no {wanted} was recorded")
    if not experiment.scenario.faults:
        sent: Counter[Pair] = Counter()
        received: Counter[Pair] = Counter()
        for event in outcome.events:
            if event.event == "send":
                sent[event.device, event.fields["peer"]] += 1
            elif event.event == "receive":
                received[event.fields["peer"], event.device] += 1
        missing = sum((sent - received).values())
        if missing > max(1, LOST_EVENTS * sent.total()):
            return Check("events", False, f"the log lacks the reception of {missing} of {sent.total()} messages")
    return Check("events", True, f"{len(outcome.events)} events, none missing")


def _faults(experiment: Experiment, struck: Sequence[Strike]) -> list[Check]:
    wanted = Counter(fault.action for fault in experiment.scenario.faults)
    if not wanted and not struck:
        return []
    absent = wanted - Counter(strike.action for strike in struck)
    if absent:
        return [Check("faults", False, f"never struck: {', '.join(sorted(absent.elements()))}")]
    late = max((strike.struck - strike.intended for strike in struck), default=0.0)
    if late > FAULT_LATENESS:
        worst = max(struck, key=lambda strike: strike.struck - strike.intended)
        return [Check("faults", False, f"{worst.action} of {worst.target} struck {late:.2f} s late")]
    return [Check("faults", True, f"{len(struck)} struck, the latest {late * 1e3:.0f} ms late")]


def _links(outcome: Outcome, experiment: Experiment) -> Check:
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


def _pacing(devices: Mapping[str, Mapping[str, Any]]) -> Check:
    shares = {name: figures["deficit_share"] for name, figures in devices.items() if figures["compute"] > 0}
    if not shares:
        return Check("pacing", None, "nothing was computed")
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] == 0:
        return Check("pacing", True, "the host kept up with every device")
    detail = f"the host made {worst} lose {shares[worst]:.1%} of the time"
    if shares[worst] > DEFICIT_SHARE:
        return Check("pacing", False, f"{detail} (at most {DEFICIT_SHARE:.0%})")
    return Check("pacing", True, detail)


def _recoveries(recovered: Sequence[Mapping[str, Any]]) -> list[Check]:
    done = [item for item in recovered if item["seconds"]]
    if not done:
        return []
    worst = max(done, key=lambda item: float(item["deficit"] / item["seconds"]))
    part = worst["deficit"] / worst["seconds"]
    detail = f"computing slower than asked made up {part:.1%} of a recovery"
    if part > RECOVERY_DEFICIT_SHARE:
        return [Check("recovery", False, f"{detail} (at most {RECOVERY_DEFICIT_SHARE:.0%})")]
    return [Check("recovery", True, detail)]


def _host(fidelity: Mapping[str, Any]) -> list[Check]:
    checks = []
    saturated = fidelity.get("host_saturated")
    if saturated is not None:
        ok = saturated <= HOST_SATURATED_SHARE
        limit = "" if ok else f" (at most {HOST_SATURATED_SHARE:.0%})"
        checks.append(Check("host", ok, f"all processors were busy for {saturated:.0%} of the run{limit}"))
    queues = fidelity.get("queues")
    if queues is not None:
        dropped = {name: sum(counts.values()) for name, counts in queues.items()}
        lost = sum(dropped.values())
        where = f" at {max(dropped, key=lambda name: dropped[name])}" if lost else ""
        checks.append(Check("queues", lost <= QUEUE_OVERFLOWS, f"{lost} packets overflowed a queue{where}"))
    lateness = fidelity.get("lateness", {}).get("p99")
    if lateness is not None:
        detail = f"1 % of the packets were delayed by {lateness * 1e3:.2f} ms more than asked, or later"
        limit = "" if lateness <= DELAY_LATENESS else f" (at most {DELAY_LATENESS * 1e3:g} ms)"
        checks.append(Check("delays", lateness <= DELAY_LATENESS, detail + limit))
    return checks
