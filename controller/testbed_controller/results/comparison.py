"""Comparison of runs: metrics, ratios to the first run, and differences between scenarios.

The repetitions of one point of a sweep on one clock (emulated or simulated) form a group, which is compared by the mean
of its metrics. Any other run is a group of its own. Each group has a label, the heading of its column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from statistics import fmean
from typing import Any

from testbed.common.errors import InputError
from testbed.common.intervals import interval
from testbed.ml import kernels
from testbed.scenario.expand import repetition_seed
from testbed.scenario.points import point_parts
from testbed_controller.results.available import all_metrics, metric_value
from testbed_controller.results.run import Run
from testbed_controller.results.summary import is_number

IGNORED_KEYS = (
    "description",
    "expect",
    "time_limit",
    "repetitions",
    "sweep",
    "points",
    "network.subnet",
)
"""Scenario keys without effect on the metrics of a run, so that differences need no mention."""
CLOCK_TOLERANCE = 0.10
"""Maximum relative difference between an emulated and a simulated run of one scenario, in step time or latency."""


def compare(grouped: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the comparison of groups of runs by label (see `side_by_side`) as plain JSON values.

    - ``runs``: for each group its label, runtime and count of runs, the path of its first run, and the status and
      verdict of its worst run.
    - ``metrics``: for each metric its name, kind and meaning (``about``), and for each group the mean (``values``, None
      if absent), the half width of the confidence interval (``half_widths``) and the ratio to the first group.
    - ``devices``: for each device and group the share of each activity.
    - ``differences``: for each dotted key in which the scenarios differ, the values of the groups.
    - ``warnings``: sentences about untrusted runs, and about differences that no sweep asked for.
    - ``clocks``: the agreement of an emulated and a simulated run of one scenario, else None.
    """
    groups = list(grouped.values())
    # The first run stands for its group, as repetitions differ only in their seed.
    first_runs = _first_runs(groups)
    differences = _scenario_differences(first_runs)
    checked = _CheckedGroups(grouped, differences)
    warnings: list[str] = []
    for check in _CHECKS:
        warnings += check(checked)
    return {
        "runs": [_describe_group(label, group) for label, group in grouped.items()],
        "metrics": list(_metric_rows(groups)),
        "devices": _device_shares(groups),
        "differences": differences,
        "warnings": warnings,
        "clocks": _compare_clocks(first_runs, differences),
    }


def _first_runs(groups: Iterable[Sequence[Run]]) -> list[Run]:
    return [group[0] for group in groups]


def _describe_group(label: str, group: Sequence[Run]) -> dict[str, Any]:
    # The column of a group shows the worst of its runs, since a mean hides an unfinished or untrusted one.
    worst = _worst_run(group)
    return {
        "path": str(group[0].path),
        "label": label,
        "runtime": group[0].outcome.runtime,
        "count": len(group),
        "status": worst.outcome.status,
        "verdict": worst.metrics["verdict"]["kind"],
    }


def _worst_run(group: Sequence[Run]) -> Run:
    """Return the first unfinished run of a group, else the first untrusted one, else the first."""
    for run in group:
        if run.outcome.status != "finished":
            return run
    for run in group:
        if not run.metrics["trusted"]:
            return run
    return group[0]


def side_by_side(
    runs: Sequence[Run], series: Sequence[str] = ()
) -> dict[str, list[Run]]:
    """Return the groups of the runs by label, in the order of their first runs.

    ``series`` selects and orders groups by label. An entry ``LABEL: NEW LABEL`` also renames the group. Raises
    `InputError` for an unknown label.
    """
    groups = _group_repetitions(runs)
    labels = _run_labels(_first_runs(groups))
    groups_by_label = dict(zip(labels, groups, strict=True))
    selected = {}
    for text in series:
        label, _, new_label = text.partition(": ")
        if label not in groups_by_label:
            raise InputError(
                f"--series: unknown group '{label}': choose one of {'; '.join(groups_by_label)}"
            )
        selected[new_label or label] = groups_by_label[label]
    return selected or groups_by_label


def _group_repetitions(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the groups of repetitions, in the order of the first run of each group."""
    runs_at_point: dict[str, list[Run]] = {}
    for run in runs:
        # With the folder: the same point of two sweeps is compared, not averaged.
        key = f"{run.outcome.runtime} {run.path.parent} {run.point}"
        runs_at_point.setdefault(key, []).append(run)
    groups: list[list[Run]] = []
    for group in runs_at_point.values():
        repetitions = {run.trial.repetition for run in group}
        # Separate runs of one scenario have the same repetition number: they are compared, not averaged.
        if len(repetitions) == len(group):
            groups.append(group)
        else:
            for run in group:
                groups.append([run])
    groups.sort(key=lambda group: min(map(runs.index, group)))
    return groups


def _run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a short label for each run; for runs of one sweep, only the differing values."""
    parts_of_runs = [_name_parts(run) for run in runs]
    labels = [",".join(parts) for parts in parts_of_runs]
    part_counts = {len(parts) for parts in parts_of_runs}
    # Names with the same number of parts are points of one sweep: equal parts distinguish nothing and are omitted.
    if len(part_counts) == 1 and part_counts != {1} and len(set(labels)) > 1:
        differs = []
        for values in zip(*parts_of_runs, strict=True):
            differs.append(len(set(values)) > 1)
        labels = [",".join(compress(parts, differs)) for parts in parts_of_runs]
    if len(set(labels)) == len(labels):
        return labels
    # Labels are the keys of the groups, so equal labels would hide a run.
    return [f"{number} {label}" for number, label in enumerate(labels, 1)]


def _name_parts(run: Run) -> list[str]:
    """Return the parts of a run's name: sweep point and repetition, or the folder name."""
    if not run.trial.point:
        return run.path.name.split(",")
    parts = list(point_parts(run.trial.point))
    if run.trial.repetition:
        parts.append(f"repetition={run.trial.repetition + 1}")
    return parts


def _scenario_values(run: Run) -> dict[str, Any]:
    """Return the plain values of a run's scenario by dotted key."""
    scenario = run.trial.scenario
    tree = scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dict(_flatten_keys(tree))


def _flatten_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from _flatten_keys(item, f"{prefix}.{key}" if prefix else str(key))


def _scenario_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the values of each key in which the scenarios of the runs differ, None where a scenario lacks the key."""
    scenarios = [_scenario_values(run) for run in runs]
    # A dictionary rather than a set, to list the keys in the order of the first scenario.
    keys: dict[str, None] = {}
    for scenario in scenarios:
        keys |= dict.fromkeys(scenario)
    differences = {}
    for key in keys:
        if _is_below_any(key, IGNORED_KEYS):
            continue
        values = [scenario.get(key) for scenario in scenarios]
        # As text, since 1 and true are equal in Python but differ in a scenario.
        if len(set(map(repr, values))) > 1:
            differences[key] = values
    return differences


def is_below(key: str, other: str) -> bool:
    """Return whether a dotted key equals another key or belongs to the other key's section.

    >>> is_below("network.link.rate", "network.link"), is_below("networks", "network")
    (True, False)
    """
    return key == other or key.startswith(f"{other}.")


def _is_below_any(key: str, others: Iterable[str]) -> bool:
    return any(is_below(key, other) for other in others)


def _metric_rows(groups: Sequence[Sequence[Run]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each compared metric of any group, with a value for each group."""
    for name, metric in all_metrics([*chain.from_iterable(groups)]).items():
        if not metric.compared:
            continue
        values: list[Any] = []
        half_widths = []
        for group in groups:
            group_values = [metric_value(run.metrics, name) for run in group]
            mean, half_width = _mean_interval(group_values)
            values.append(mean)
            half_widths.append(half_width)
        if all(value is None for value in values):
            continue
        yield {
            "name": name,
            "kind": metric.kind,
            "about": metric.meaning,
            "values": values,
            "half_widths": half_widths,
            "ratios": [_ratio_to_first(value, values[0]) for value in values],
        }


def _mean_interval(values: Sequence[Any]) -> tuple[Any, float | None]:
    """Return the mean of numbers and the half width of the interval; without numbers, the first value and None."""
    numbers = [value for value in values if is_number(value)]
    if not numbers:
        return values[0], None
    return interval(numbers)


def _ratio_to_first(value: Any, first: Any) -> float | None:
    """Return the ratio of two numbers; None for other values, for example texts, and for a first value of 0."""
    if not is_number(value) or not is_number(first) or first == 0:
        return None
    return value / first


def _device_shares(
    groups: Sequence[Sequence[Run]],
) -> dict[str, list[dict[str, float] | None]]:
    """Return the activity shares of each device by name, with an entry for each group."""
    names: dict[str, None] = {}
    for run in chain.from_iterable(groups):
        names |= dict.fromkeys(run.metrics["devices"])
    shares = {}
    for name in names:
        shares[name] = [_mean_shares(name, group) for group in groups]
    return shares


def _mean_shares(device: str, runs: Sequence[Run]) -> dict[str, float] | None:
    """Return the mean activity shares of a device over several runs; None if absent from all runs."""
    rows = []
    for run in runs:
        if device in run.metrics["devices"]:
            rows.append(run.metrics["devices"][device])
    if not rows:
        return None
    shares = {}
    for activity in ("compute", "communicate", "down", "idle"):
        shares[activity] = fmean(row[f"{activity}_share"] for row in rows)
    return shares


@dataclass(frozen=True)
class _CheckedGroups:
    """The input of the checks, which yield the warnings of a comparison."""

    groups: Mapping[str, Sequence[Run]]
    """Runs by label of their group."""
    differences: Mapping[str, Sequence[Any]]
    """Values of the groups for each scenario key in which they differ."""

    @property
    def runs(self) -> list[Run]:
        """All runs of all groups."""
        return list(chain.from_iterable(self.groups.values()))

    @property
    def mixes_programs(self) -> bool:
        """Whether some runs execute programs of the user and some a method."""
        return len({run.trial.scenario.workload.own_programs for run in self.runs}) > 1

    def is_intended(self, key: str) -> bool:
        """Return whether a difference in a key needs no warning, for example because of a sweep or of repetitions."""
        # A name has no effect: scenarios that are made to be compared have different names.
        if key == "name" or self._is_swept(key):
            return True
        if key == "seed":
            return self._has_seeds_of_repetitions()
        # Programs have other workload keys than methods; `_check_tasks` yields one warning for all of them.
        return self.mixes_programs and key.startswith("workload.")

    def _has_seeds_of_repetitions(self) -> bool:
        """Return whether the seeds of all runs may belong to the repetitions of one scenario."""
        seeds: dict[int, int] = {}
        for run in self.runs:
            seed = run.trial.scenario.seed
            if seeds.setdefault(run.trial.repetition, seed) != seed:
                return False
        # Without the first repetition, the scenario's own seed is unknown.
        if 0 not in seeds:
            return True
        expected = {}
        for repetition in seeds:
            expected[repetition] = repetition_seed(seeds[0], repetition)
        return seeds == expected

    def _is_swept(self, key: str) -> bool:
        # A sweep over a section, such as a method with its options, changes all keys of the section.
        return any(_is_below_any(key, run.trial.point) for run in self.runs)


def _check_tasks(checked: _CheckedGroups) -> Iterator[str]:
    if checked.mixes_programs:
        yield "some runs execute user programs and others a method: check that their workloads match"


def _check_scenarios(checked: _CheckedGroups) -> Iterator[str]:
    for key, values in checked.differences.items():
        if checked.is_intended(key):
            continue
        texts = ["–" if value is None else str(value) for value in values]
        yield f"the scenarios differ in {key}: {' | '.join(texts)}"


def _check_verdicts(checked: _CheckedGroups) -> Iterator[str]:
    for label, group in checked.groups.items():
        untrusted = [run for run in group if not run.metrics["trusted"]]
        if not untrusted:
            continue
        name = label
        if len(group) > 1:
            name = f"{label}: {len(untrusted)} of {len(group)} runs"
        verb = "are" if len(untrusted) > 1 else "is"
        reason = untrusted[0].metrics["verdict"]["summary"]
        yield f"{name} {verb} not trusted: {reason}"


def _check_congestion_control(checked: _CheckedGroups) -> Iterator[str]:
    algorithms = set()
    for run in checked.runs:
        # The simulator has one model of TCP for all runs.
        if run.outcome.runtime == "emulate":
            fidelity = run.outcome.fidelity
            algorithms.add(fidelity.get("congestion_control", "that of the host"))
    if len(algorithms) > 1:
        yield f"TCP's congestion control differs between the runs: {', '.join(sorted(algorithms))}"


def _check_processors(checked: _CheckedGroups) -> Iterator[str]:
    processors = set()
    for run in checked.runs:
        if _processors_of(run):
            processors.add(_describe_processors(run))
    if len(processors) > 1:
        names = " | ".join(sorted(processors))
        yield f"losses and weights may differ, since the runs computed on {names}"


def _check_revisions(checked: _CheckedGroups) -> Iterator[str]:
    if len({run.manifest.get("revision") for run in checked.runs}) > 1:
        yield "the runs were made by different revisions of the testbed"


_CHECKS = (
    _check_tasks,
    _check_scenarios,
    _check_verdicts,
    _check_congestion_control,
    _check_processors,
    _check_revisions,
)


def _processors_of(run: Run) -> list[dict[str, Any]]:
    """Return the processors used by a run; empty if no device or run had torch."""
    processors = run.manifest.get("host", {}).get("computing", ())
    # A device without torch is recorded as null.
    return [each for each in processors if each is not None]


def _describe_processors(run: Run) -> str:
    """Return the processors, instruction sets and torch versions relevant to a run's numerics."""
    fixed = " with fixed kernels" if run.trial.scenario.workload.is_reproducible else ""
    return kernels.named(_processors_of(run)) + fixed


def _compare_clocks(
    runs: Sequence[Run], differences: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Compare the first emulated with the first simulated run of one scenario, by step time or latency.

    Returns None for runs of different scenarios, or on one clock only. A run of training has a step time, a run of
    inference a latency.
    """
    # By runtime: "emulate" or "simulate".
    first_runs: dict[str, Run] = {}
    for run in runs:
        if run.metrics.get("step_time", run.metrics.get("latency")) is not None:
            first_runs.setdefault(run.outcome.runtime, run)
    if len(first_runs) < 2 or differences.keys() - {"name"}:
        return None
    metric = "step_time" if "step_time" in first_runs["emulate"].metrics else "latency"
    emulated = first_runs["emulate"].metrics.get(metric)
    simulated = first_runs["simulate"].metrics.get(metric)
    if emulated is None or not simulated:
        return None
    ratio = emulated / simulated
    return {
        "metric": metric,
        "emulated": emulated,
        "simulated": simulated,
        "ratio": ratio,
        "agree": abs(ratio - 1) <= CLOCK_TOLERANCE,
    }
