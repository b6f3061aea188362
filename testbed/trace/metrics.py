"""The figures of a run, computed from its events and nothing else."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from testbed.experiment import Experiment
from testbed.framing import cast_wire_bytes, wire_bytes
from testbed.network.link import Link, Pair
from testbed.plan import Plan
from testbed.trace.bound import busiest
from testbed.trace.changes import after, busiest_share, last_change, pace_figures, pauses
from testbed.trace.critical import CriticalPaths, Lateness
from testbed.trace.disturbances import Recovery, Strike, recoveries, strikes
from testbed.trace.events import Event
from testbed.trace.gantt import Bar, bars, run_end
from testbed.trace.intervals import Interval, clip, overlaps, subtract, total, union
from testbed.trace.outcome import LinkMeasurement, Outcome
from testbed.trace.verdict import HostTime, mean_lateness, verdict

PERCENTILES = (95, 99)


def metrics(outcome: Outcome, experiment: Experiment, plan: Plan) -> dict[str, Any]:
    """Return the figures of a run as plain JSON values. Seconds, bytes, bit/s and fractions of one throughout.

    Figures by name, the ones that ``expect`` may use; one that the run gives no ground for is absent:

    ========================== ====================================================================================
    accuracy, test_loss        last evaluation on the test data
    loss, loss_first           training loss of the last and of the first step
    steps, steps_repeated      training steps done, each counted once; those done again after a recovery
    samples                    training samples of the steps, each step counted once
    duration                   from the start of the workload until the lead's program ended
    samples_per_second         samples / duration, with everything that went wrong
    step_time                  median time per step in the steady phase (see below)
    step_time_mean             mean of the same steps
    step_time_p95              95th percentile of the same steps
    steady_steps               how many steps those were; 0 when no step was undisturbed and all had to be used
    predicted_step_time        what the planner predicted
    faults                     faults that struck, without those that mend
    recoveries                 faults that the method noticed and outlived
    unrecovered                faults that the method noticed and did not outlive
    recovery_time              longest time from strike to resumption
    detection_time             longest time from strike to detection
    resume_time                longest time from detection to resumption
    repartition_time           longest time from detection to the decision who goes on with what
    redistribution_time        longest time from that decision until all devices have what they need for it
    first_batch_time           longest time from detection until the first batch after it was trained
    recovery_bytes             weights and optimizer state that recoveries moved
    repartitions               changes of the partition in a run that goes on, without those of recoveries
    repartition_pause          longest time that such a change let no batch in: draining the pipeline, moving, agreeing
    repartition_draining       the part of that pause until the pipeline was empty, of the longest
    repartition_moving         longest time from then on: agreeing, moving
    repartition_bytes          weights and optimizer state that they moved in all
    versions_kept              most versions of its weights that any stage kept at once
    step_time_before           median of the steady steps before the first fault that the method noticed
    step_time_after            median of those after the last recovery or repartition, of all where there was none
    busiest_share              largest share of the steady steps' time, after the last recovery or repartition, that a
                               device computes or a link carries
    requests                   inferences done
    requests_per_second        requests / duration
    objects                    found in the samples of all requests together, by a network that detects some
    latency, latency_mean      median and mean latency of a request
    latency_p95, latency_p99   percentiles of it; latency_max is the longest
    requests_failed            inferences given up
    over_predicted             from one answer to the next, over ``predicted_step_time``
    path_compute, path_network mean seconds of a request's critical path that were computing, and messages under way
    over_bound                 from the first request to the last answer, over what the busiest processor or link
                               needed for its work in that time (``testbed.trace.bound``); 1 is the best there is
    casts, cast_time           how many in all, and the median of how long one took to leave its device
    reception                  casts heard over casts meant to be heard, each counted once for each of its peers
    messages, bytes_sent       sum over all devices; a cast counts once
    bytes_received             sum over all devices
    compute_share, idle_share  mean over the devices of the plan
    compute_deficit            seconds by which the host made computations late, summed over the devices
    deficit_share              the same within the steady phase, as a share of its time, of the worst device
    host_share                 share of the undisturbed steps' (requests') time that the host added to their critical
                               paths (``testbed.trace.critical``)
    trusted                    true when the verdict holds nothing against the run
    ========================== ====================================================================================

    Further keys hold tables: ``runtime``, ``status``, ``error``, ``weights`` (the file that they were read from, None
    where they were drawn from the seed); ``series`` (``steps``: step, time, seconds, loss, samples, steady;
    ``evaluations``; ``requests``; ``objects``: boxes of each sample asked about), ``devices`` by name (``compute``,
    ``send``, ``receive``, ``down``, ``idle`` seconds and their ``_share`` of the duration, ``communicate``: sending or
    receiving while not computing, traffic, ``flops``, ``deficit``; bytes of ``weights`` and most ``activations`` where
    the method says), ``links`` (those used or measured), ``fault_list``, ``recovery_list``, ``repartition_list``,
    ``version_list`` (what each stage kept in each stretch of asynchronous training), ``verdict`` (see
    ``testbed.trace.verdict``).

    ``compute``, ``send`` and ``receive`` are each a union of intervals and may overlap one another; ``idle`` is what
    none of them and no outage covers, so compute + communicate + down + idle is the duration.

    A step's time runs from the step before it. The steady phase is every step but the first that has the usual
    number of samples and whose time holds no evaluation, no fault and no recovery.
    """
    end = run_end(outcome.events, plan.lead)
    events = [event for event in outcome.events if event.time <= end]
    struck, outlived = strikes(events), recoveries(events)
    windows = [strike.window(end) for strike in struck if not strike.mends] + pauses(events)
    steps = _steps(events, windows, outlived, end)
    devices = _devices(outcome.events, experiment, plan, end, _phase(events, steps, end))
    recovered = [_recovery(recovery, outcome.events) for recovery in outlived]
    links = _links(events, experiment.links, outcome.links, end)
    added = _added(outcome, experiment, plan, steps, events)
    figures: dict[str, Any] = {
        "runtime": outcome.runtime,
        "status": outcome.status,
        "error": outcome.error,
        "weights": experiment.workload.model.weights,
        **_learning(events, steps),
        "duration": end,
        **_pace(steps, end),
        **({} if plan.step_time is None else {"predicted_step_time": plan.step_time}),
        "faults": sum(not strike.mends for strike in struck),
        **_recovery_times(outlived),
        **_asynchronous(events),
        **pace_figures(events, steps, outlived),
        **_busiest(outcome, experiment, events, after(steps, last_change(events, outlived)), end),
        **_inference(events, end),
        **_paths(events, experiment, plan),
        **_casting(events),
        "messages": sum(device["messages_sent"] for device in devices.values()),
        "bytes_sent": sum(device["bytes_sent"] for device in devices.values()),
        "bytes_received": sum(device["bytes_received"] for device in devices.values()),
        **_shares(devices, set(plan.devices)),
        "compute_deficit": sum(device["deficit"] for device in devices.values()),
        "deficit_share": max((device["deficit_share"] for device in devices.values()), default=0.0),
        "host_share": added.share,
    }
    judgement = verdict(outcome, experiment, plan, added, struck, recovered)
    figures["trusted"] = judgement["trusted"]
    figures["series"] = {
        "steps": steps,
        "evaluations": [{"time": event.time, **event.fields} for event in events if event.event == "evaluate"],
        "requests": [{"time": event.time, **event.fields} for event in events if event.event == "request"],
        "objects": [dict(event.fields) for event in events if event.event == "objects"],
    }
    figures["devices"] = devices
    figures["version_list"] = [{"device": e.device, **e.fields} for e in events if e.event == "versions"]
    figures["repartition_list"] = [{"time": e.time, **e.fields} for e in events if e.event == "repartition"]
    figures["links"] = links
    figures["fault_list"] = [_fault(strike) for strike in struck]
    figures["recovery_list"] = recovered
    figures["verdict"] = judgement
    clean: dict[str, Any] = finite(figures)
    return clean


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the closest ranks; raises ValueError without values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def finite(value: Any) -> Any:
    """Return the same value with None for numbers that JSON does not know: a diverged loss is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _steps(
    events: Sequence[Event], windows: Collection[Interval], outlived: Sequence[Recovery], end: float
) -> list[dict[str, Any]]:
    """Return one row per step event with the time it took and whether it belongs to the steady phase."""
    done = [event for event in events if event.event == "step"]
    usual = Counter(event.fields.get("samples") for event in done).most_common(1)
    disturbed = [
        *windows,
        *((item.detected, end if item.resumed is None else item.resumed) for item in outlived),
    ]
    moments = [event.time for event in events if event.event == "evaluate"]
    rows: list[dict[str, Any]] = []
    previous = 0.0
    for index, event in enumerate(done):
        evaluated = any(previous < moment <= event.time for moment in moments)
        alike = event.fields.get("samples") == usual[0][0]
        calm = not overlaps((previous, event.time), disturbed)
        rows.append(
            {
                "step": event.fields.get("step"),
                "time": event.time,
                "seconds": event.time - previous,
                "loss": event.fields.get("loss"),
                "samples": event.fields.get("samples"),
                "steady": index > 0 and alike and calm and not evaluated,
            }
        )
        previous = event.time
    return rows


def _phase(events: Sequence[Event], steps: Sequence[Mapping[str, Any]], end: float) -> list[Interval]:
    """Return the stretches that step times and latencies are taken from; the whole run where there are none."""
    steady = [(row["time"] - row["seconds"], row["time"]) for row in steps if row["steady"]]
    served = [(event.time - event.fields["latency"], event.time) for event in events if event.event == "request"]
    return union(steady or served) or [(0.0, end)]


def _learning(events: Sequence[Event], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    evaluations = [event for event in events if event.event == "evaluate"]
    if evaluations:
        figures["accuracy"] = evaluations[-1].fields.get("accuracy")
        figures["test_loss"] = evaluations[-1].fields.get("loss")
    if steps:
        figures["loss"] = steps[-1]["loss"]
        figures["loss_first"] = steps[0]["loss"]
    return figures


def _pace(steps: Sequence[Mapping[str, Any]], end: float) -> dict[str, Any]:
    if not steps:
        return {"steps": 0}
    once = {row["step"]: row for row in steps}
    samples = sum(row["samples"] or 0 for row in once.values())
    steady = [row["seconds"] for row in steps if row["steady"]]
    times = steady or [row["seconds"] for row in steps]
    return {
        "steps": len(once),
        "steps_repeated": len(steps) - len(once),
        "samples": samples,
        "samples_per_second": samples / end if end > 0 else 0.0,
        "step_time": median(times),
        "step_time_mean": fmean(times),
        "step_time_p95": percentile(times, 95),
        "steady_steps": len(steady),
    }


def _recovery_times(outlived: Sequence[Recovery]) -> dict[str, Any]:
    done = [item for item in outlived if item.resumed is not None]
    figures: dict[str, Any] = {"recoveries": len(done), "unrecovered": len(outlived) - len(done)}
    if done:
        figures["recovery_time"] = max(item.duration or 0.0 for item in done)
        figures["resume_time"] = max((item.resumed or 0.0) - item.detected for item in done)
    for name, begun, ended in (
        ("repartition_time", "detected", "repartitioned"),
        ("redistribution_time", "repartitioned", "redistributed"),
        ("first_batch_time", "detected", "trained"),
    ):
        spans = [(getattr(item, begun), getattr(item, ended)) for item in outlived]
        known = [last - first for first, last in spans if first is not None and last is not None]
        if known:
            figures[name] = max(known)
    moved = [item.moved for item in outlived if item.moved is not None]
    if moved:
        figures["recovery_bytes"] = sum(moved)
    noticed = [item.detected - item.struck for item in outlived if item.struck is not None]
    if noticed:
        figures["detection_time"] = max(noticed)
    return figures


def _asynchronous(events: Sequence[Event]) -> dict[str, Any]:
    """Return what only asynchronous training has to tell."""
    figures: dict[str, Any] = {}
    changes = [event.fields for event in events if event.event == "repartition"]
    reports = [event.fields for event in events if event.event == "versions"]
    if reports:
        figures["versions_kept"] = max(report["kept"] for report in reports)
        figures["repartitions"] = len(changes)
    if changes:
        longest = max(changes, key=lambda change: float(change["seconds"]))
        figures["repartition_pause"] = longest["seconds"]
        figures["repartition_draining"] = longest["draining"]
        figures["repartition_moving"] = max(change["seconds"] - change["draining"] for change in changes)
        figures["repartition_bytes"] = sum(change["bytes"] for change in changes)
    return figures


def _busiest(
    outcome: Outcome, experiment: Experiment, events: Sequence[Event], steps: Sequence[Mapping[str, Any]], end: float
) -> dict[str, float]:
    computing: dict[str, list[Interval]] = defaultdict(list)
    for bar in bars(outcome.events, end):
        if bar.kind == "compute":
            computing[bar.device].append((bar.start, bar.end))
    share = busiest_share([union(part) for part in computing.values()], experiment.links, events, steps)
    return {} if share is None else {"busiest_share": share}


def _last_of_each(events: Sequence[Event]) -> list[Event]:
    """Return what became of each request in the end: a lead that starts over after its own death asks all again."""
    ends = [event for event in events if event.event in ("request", "failed")]
    last = {event.fields["request"]: event for event in ends}
    return [event for event in ends if last[event.fields["request"]] is event]


def _inference(events: Sequence[Event], end: float) -> dict[str, Any]:
    latencies = [float(event.fields["latency"]) for event in _last_of_each(events) if event.event == "request"]
    if not latencies:
        return {}
    seen = {(event.fields["request"], event.fields["sample"]): event for event in events if event.event == "objects"}
    objects = [len(event.fields["boxes"]) for event in seen.values()]
    return {
        **({"objects": sum(objects)} if objects else {}),
        "requests": len(latencies),
        "requests_per_second": len(latencies) / end if end > 0 else 0.0,
        "latency": median(latencies),
        "latency_mean": fmean(latencies),
        **{f"latency_p{percent}": percentile(latencies, percent) for percent in PERCENTILES},
        "latency_max": max(latencies),
    }


def _paths(events: Sequence[Event], experiment: Experiment, plan: Plan) -> dict[str, Any]:
    """Return what requests spent their time on, and how far all of them are from what cannot be beaten."""
    ends = _last_of_each(events)
    failed = sum(event.event == "failed" for event in ends)
    windows = [(event.time - event.fields["latency"], event.time) for event in ends if event.event == "request"]
    figures: dict[str, Any] = {"requests_failed": failed} if failed or windows else {}
    if not windows:
        return figures
    paths = CriticalPaths(events, experiment)
    spent = [paths.spent(plan.lead, window) for window in windows]
    figures["path_compute"] = fmean(each.computing for each in spent)
    figures["path_network"] = fmean(each.messaging for each in spent)
    whole = (min(begin for begin, _ in windows), max(end for _, end in windows))
    if plan.step_time:
        figures["over_predicted"] = (whole[1] - whole[0]) / len(windows) / plan.step_time
    needed = busiest(events, experiment, whole)
    return figures | ({"over_bound": (whole[1] - whole[0]) / needed} if needed else {})


def _shares(devices: Mapping[str, Mapping[str, Any]], planned: Collection[str]) -> dict[str, Any]:
    used = [figures for name, figures in devices.items() if name in planned]
    if not used:
        return {}
    return {key: fmean(figures[key] for figures in used) for key in ("compute_share", "idle_share")}


def _intervals(charted: Iterable[Bar], kind: str, end: float) -> list[Interval]:
    return union(clip(((bar.start, bar.end) for bar in charted if bar.kind == kind), 0.0, end))


def _devices(
    events: Sequence[Event], experiment: Experiment, plan: Plan, end: float, phase: Sequence[Interval]
) -> dict[str, dict[str, Any]]:
    charted: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars(events, end):
        charted[bar.device].append(bar)
    own: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        own[event.device].append(event)
    table = {}
    for spec in experiment.devices:
        row: dict[str, Any] = {"profile": spec.profile, "speed": spec.speed}
        if held := plan.of(spec.name):
            row["units"] = [end for piece in held for end in (piece.first, piece.last)]
        row |= _activity(charted[spec.name], end)
        row |= _work(own[spec.name])
        row["deficit_share"] = _share(_deficit(own[spec.name], phase), phase)
        row["waited_share"] = _share(_waited(own[spec.name], phase), phase)
        table[spec.name] = row
    return table


def _activity(charted: Sequence[Bar], end: float) -> dict[str, float]:
    compute, send, receive, down = (_intervals(charted, kind, end) for kind in ("compute", "send", "receive", "down"))
    # What a dead device was said to do (a send that was retried meanwhile, say) is not activity.
    compute, send, receive = (subtract(part, down) for part in (compute, send, receive))
    communicate = subtract([*send, *receive], compute)
    idle = subtract([(0.0, end)], [*compute, *send, *receive, *down])
    parts = {"compute": compute, "send": send, "receive": receive, "communicate": communicate, "down": down}
    seconds = {name: total(part) for name, part in {**parts, "idle": idle}.items()}
    shares = {f"{name}_share": value / end if end > 0 else 0.0 for name, value in seconds.items()}
    return seconds | shares


def _work(own: Sequence[Event]) -> dict[str, Any]:
    computed = [event.fields for event in own if event.event == "compute"]
    sent = [event.fields for event in own if event.event in ("send", "cast")]
    received = [event.fields for event in own if event.event == "receive"]
    resident = [event.fields for event in own if event.event == "memory"][-1:]
    return {
        **{name: fields[name] for fields in resident for name in ("weights", "activations")},
        "messages_sent": len(sent),
        "bytes_sent": sum(fields.get("bytes", 0) for fields in sent),
        "messages_received": len(received),
        "bytes_received": sum(fields.get("bytes", 0) for fields in received),
        "flops": sum(fields.get("flops", 0.0) for fields in computed),
        "busy": sum(fields.get("busy", 0.0) for fields in computed),
        "deficit": sum(_late(fields) for fields in computed),
    }


def _share(seconds: float, phase: Sequence[Interval]) -> float:
    return seconds / total(phase) if total(phase) > 0 else 0.0


def _late(computed: Mapping[str, Any]) -> float:
    """Return by how much the host made a computation late; older logs tell only what it needed too much."""
    return float(computed.get("late", computed.get("deficit", 0.0)))


def _added(
    outcome: Outcome,
    experiment: Experiment,
    plan: Plan,
    steps: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
) -> HostTime:
    """Return what the host added to the steps that are undisturbed, or to the requests."""
    windows = [(row["time"] - row["seconds"], row["time"]) for row in steps if row["steady"]]
    windows = windows or [(row["time"] - row["seconds"], row["time"]) for row in steps]
    windows += [(event.time - event.fields["latency"], event.time) for event in events if event.event == "request"]
    paths = CriticalPaths(outcome.events, experiment, mean_lateness(outcome.fidelity.get("lateness", {})))
    late = sum((paths.lateness(plan.lead, window) for window in windows), Lateness())
    return HostTime(sum(end - start for start, end in windows), late.computing, late.messaging)


def _waited(own: Sequence[Event], phase: Sequence[Interval]) -> float:
    """Return the seconds that threads of a device waited for the host within a phase, evenly over each interval."""
    waited = 0.0
    for event in own:
        if event.event == "host" and event.fields["interval"] > 0:
            span = event.fields["interval"]
            within = total(clip(phase, event.time - span, event.time))
            waited += event.fields["waited"] * within / span
    return waited


def _deficit(own: Sequence[Event], phase: Sequence[Interval]) -> float:
    """Return by how many seconds the host made computations late that ended within a phase, in order and disjoint."""
    starts = [start for start, _ in phase]
    lost = 0.0
    for event in own:
        if event.event == "compute":
            place = bisect_left(starts, event.time) - 1
            if place >= 0 and event.time <= phase[place][1]:
                lost += _late(event.fields)
    return lost


def _casting(events: Sequence[Event]) -> dict[str, Any]:
    casts = [event.fields for event in events if event.event == "cast"]
    if not casts:
        return {}
    meant = sum(len(cast["peers"]) for cast in casts)
    heard = sum(event.event == "receive" and "cast" in event.fields for event in events)
    figures = {"casts": len(casts), "cast_time": median(cast["duration"] for cast in casts)}
    return figures | ({"reception": heard / meant} if meant else {})


def _links(
    events: Sequence[Event], links: Mapping[Pair, Link], measurements: Sequence[LinkMeasurement], end: float
) -> list[dict[str, Any]]:
    """Return one row per directed link that was used or measured, in the order of the experiment."""
    count: Counter[Pair] = Counter()
    size: Counter[Pair] = Counter()
    carried: defaultdict[Pair, float] = defaultdict(float)
    casts: Counter[Pair] = Counter()
    heard: Counter[Pair] = Counter()
    for event in events:
        if event.event == "receive" and "cast" in event.fields:
            heard[event.fields["peer"], event.device] += 1
        peers = [event.fields["peer"]] if event.event == "send" else event.fields.get("peers", ())
        if event.event in ("send", "cast"):
            content = event.fields.get("bytes", 0)
            framed = cast_wire_bytes(content) if event.event == "cast" else wire_bytes(content)
            for peer in peers:
                count[event.device, peer] += 1
                size[event.device, peer] += content
                carried[event.device, peer] += framed
                casts[event.device, peer] += event.event == "cast"
    measured = {(item.source, item.destination): item for item in measurements}
    order = [pair for pair in links if pair in count or pair in measured]
    order += [pair for pair in count if pair not in links]
    rows = []
    for pair in order:
        found = measured.get(pair)
        requested = found.requested if found else links.get(pair)
        rows.append(
            {
                "source": pair[0],
                "destination": pair[1],
                "messages": count[pair],
                "bytes": size[pair],
                "casts": casts[pair],
                "casts_heard": heard[pair],
                "requested": _link(requested),
                "measured": _measured(found),
                "problem": found.problem if found else None,
                "used_share": _used(requested, carried[pair], end),
            }
        )
    return rows


def _link(link: Link | None) -> dict[str, Any] | None:
    return None if link is None else asdict(link)


def _measured(found: LinkMeasurement | None) -> dict[str, Any] | None:
    if found is None or (found.rate is None and found.delay is None and found.loss is None):
        return None
    return {"rate": found.rate, "delay": found.delay, "loss": found.loss, "packets": found.packets}


def _used(link: Link | None, wire_bytes: float, end: float) -> float | None:
    if link is None or link.rate is None or end <= 0:
        return None
    return link.transmission_time(wire_bytes) / end


def _fault(strike: Strike) -> dict[str, Any]:
    return {
        "action": strike.action,
        "target": strike.target,
        "intended": strike.intended,
        "struck": strike.struck,
        "late": strike.struck - strike.intended,
        "undone": strike.undone,
        "recovered": strike.recovered,
        "mends": strike.mends,
    }


def _recovery(recovery: Recovery, events: Sequence[Event]) -> dict[str, Any]:
    own: dict[str, list[Event]] = defaultdict(list)
    begun = recovery.detected if recovery.struck is None else recovery.struck
    for event in events:
        if recovery.resumed is not None and begun < event.time <= recovery.resumed:
            own[event.device].append(event)
    window = [(begun, begun if recovery.resumed is None else recovery.resumed)]
    return {
        "struck": recovery.struck,
        "detected": recovery.detected,
        "resumed": recovery.resumed,
        "seconds": recovery.duration,
        "step": recovery.step,
        "missing": list(recovery.missing),
        "repartitioned": recovery.repartitioned,
        "redistributed": recovery.redistributed,
        "trained": recovery.trained,
        "moved": recovery.moved,
        "case": recovery.case,
        "deficit": max((_deficit(part, window) for part in own.values()), default=0.0),
    }
