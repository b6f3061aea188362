"""Comparison of runs: metrics, ratios to the first run, and differences between scenarios.

The repetitions of one point, on one clock, stand side by side as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from statistics import fmean
from typing import Any

from testbed.common.errors import InputError
from testbed.common.intervals import interval
from testbed.ml import kernels
from testbed.scenario.points import point_parts
from testbed_controller.results.run import Run
from testbed_controller.results.summary import all_figures, is_number

UNIMPORTANT = (
    "description",
    "expect",
    "time_limit",
    "repetitions",
    "sweep",
    "points",
    "network.subnet",
)
"""Scenario keys without effect on metrics."""
TWO_CLOCKS = 0.10
"""Maximum relative difference of step times between an emulated and a simulated run of one scenario."""


def compare(grouped: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the comparison of runs as plain JSON values; see `side_by_side` for the groups.

    ``runs``: path (of the first), label, runtime, count, verdict, status; ``figures``: name, kind, about, values
    (means; None where absent), half_widths of their intervals and ratios to the first; ``devices``: per device the
    share of each activity; ``differences``: dotted key of the scenario -> values; ``warnings``: unrequested
    differences, untrusted runs; ``clocks``: agreement of the two runtimes on one scenario, or None.
    """
    groups = list(grouped.values())
    firsts = [group[0] for group in groups]
    plain = [
        dict(
            _flatten_keys(
                run.trial.scenario.model_dump(
                    mode="json", by_alias=True, exclude_none=True
                )
            )
        )
        for run in firsts
    ]
    differences = _scenario_differences(plain)
    compared = _Compared(grouped, differences)
    return {
        "runs": [
            {
                "path": str(group[0].path),
                "label": label,
                "runtime": group[0].outcome.runtime,
                "count": len(group),
                **_worst_status(group),
            }
            for label, group in grouped.items()
        ],
        "figures": list(_metric_rows(groups)),
        "devices": _device_shares(groups),
        "differences": differences,
        "warnings": [text for check in _CHECKS for text in check(compared)],
        "clocks": _compare_clocks(firsts, differences),
    }


def side_by_side(
    runs: Sequence[Run], series: Sequence[str] = ()
) -> dict[str, list[Run]]:
    """Group runs by distinguishing labels, with the repetitions of a point together, in order.

    ``series`` selects and orders groups, each as its name or as ``NAME: LABEL`` for another label. Raises `InputError`
    for an unknown name.
    """
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(
            f"{run.outcome.runtime} {run.path.parent} {run.point}", []
        ).append(run)
    groups: list[list[Run]] = []
    for group in alike.values():
        # Two runs of a scenario that were made one by one are not repetitions.
        apart = len({run.trial.repetition for run in group}) == len(group)
        groups += [group] if apart else [[run] for run in group]
    groups.sort(key=lambda group: min(map(runs.index, group)))
    groups_by_label = dict(
        zip(_run_labels([group[0] for group in groups]), groups, strict=True)
    )
    chosen = {}
    for text in series:
        name, _, label = text.partition(": ")
        if name not in groups_by_label:
            raise InputError(
                f"--series: unknown group '{name}': choose one of {'; '.join(groups_by_label)}"
            )
        chosen[label or name] = groups_by_label[name]
    return chosen or groups_by_label


def _worst_status(group: Sequence[Run]) -> dict[str, str]:
    """Return status and verdict of the first unfinished or untrusted run of a group."""
    run = next(
        (
            run
            for run in group
            if run.outcome.status != "finished" or not run.metrics["trusted"]
        ),
        group[0],
    )
    return {"status": run.outcome.status, "verdict": run.metrics["verdict"]["kind"]}


def _run_labels(runs: Sequence[Run]) -> list[str]:
    """Return short distinguishing names of the runs; for runs of one sweep, only the differences."""
    parts = [_name_parts(run) for run in runs]
    names = [",".join(each) for each in parts]
    if (
        len({len(each) for each in parts}) == 1
        and len(parts[0]) > 1
        and len(set(names)) > 1
    ):
        differ = [len(set(values)) > 1 for values in zip(*parts, strict=True)]
        names = [",".join(compress(each, differ)) for each in parts]
    if len(set(names)) == len(names):
        return names
    return [f"{number} {name}" for number, name in enumerate(names, 1)]


def _name_parts(run: Run) -> list[str]:
    """Return the parts of a run's name: sweep point and repetition, or the folder name."""
    if not run.trial.point:
        return run.path.name.split(",")
    repetition = (
        [f"repetition={run.trial.repetition + 1}"] if run.trial.repetition else []
    )
    return [*point_parts(run.trial.point), *repetition]


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


def _scenario_differences(plain: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = list(dict.fromkeys(key for one in plain for key in one))
    differences = {}
    for key in keys:
        values = [one.get(key) for one in plain]
        if len(set(map(repr, values))) > 1 and not any(
            is_below(key, other) for other in UNIMPORTANT
        ):
            differences[key] = values
    return differences


def is_below(key: str, other: str) -> bool:
    """Return whether a dotted key equals another one or lies below."""
    return key == other or key.startswith(f"{other}.")


def _metric_rows(grouped: Sequence[Sequence[Run]]) -> Iterator[dict[str, Any]]:
    for name, figure in all_figures(
        [run for group in grouped for run in group]
    ).items():
        means = [
            _mean_interval([run.metrics.get(name) for run in group])
            for group in grouped
        ]
        values = [value for value, _ in means]
        if figure.compared and any(value is not None for value in values):
            yield {
                "name": name,
                "kind": figure.kind,
                "about": figure.meaning,
                "values": values,
                "half_widths": [half for _, half in means],
                "ratios": [_ratio_to_first(value, values[0]) for value in values],
            }


def _mean_interval(values: Sequence[Any]) -> tuple[Any, float | None]:
    """Return mean and interval half width of numbers; for other values, the first one."""
    numbers = [value for value in values if is_number(value)]
    return interval(numbers) if numbers else (values[0], None)


def _ratio_to_first(value: float | None, first: float | None) -> float | None:
    return None if value is None or not first else value / first


def _device_shares(
    grouped: Sequence[Sequence[Run]],
) -> dict[str, list[dict[str, float] | None]]:
    names = list(
        dict.fromkeys(
            name
            for group in grouped
            for run in group
            for name in run.metrics["devices"]
        )
    )
    return {
        name: [
            _mean_shares([run.metrics["devices"].get(name) for run in group])
            for group in grouped
        ]
        for name in names
    }


def _mean_shares(rows: Sequence[Mapping[str, Any] | None]) -> dict[str, float] | None:
    """Return the mean activity shares of a device over several runs; None if absent from all of them."""
    some = [row for row in rows if row is not None]
    parts = ("compute", "communicate", "down", "idle")
    return (
        {part: fmean(row[f"{part}_share"] for row in some) for part in parts}
        if some
        else None
    )


@dataclass(frozen=True)
class _Compared:
    """Groups of runs for comparison checks."""

    groups: Mapping[str, Sequence[Run]]
    differences: Mapping[str, Sequence[Any]]

    @property
    def runs(self) -> list[Run]:
        """All runs of all groups."""
        return list(chain.from_iterable(self.groups.values()))

    @property
    def mixes_programs(self) -> bool:
        """Whether some runs are of programs and some of a method."""
        return len({run.trial.scenario.workload.own_programs for run in self.runs}) > 1

    def is_intended(self, key: str) -> bool:
        """Whether a difference in a key was asked for: by a sweep, or in seeds by repetitions."""
        if key == "seed":
            return len(
                {run.trial.repetition for run in self.runs}
            ) > 1 or self._is_swept(key)
        return self._is_swept(key) or (
            self.mixes_programs and key.startswith("workload.")
        )

    def _is_swept(self, key: str) -> bool:
        return any(
            is_below(key, other) for run in self.runs for other in run.trial.point
        )


def _check_tasks(compared: _Compared) -> Iterator[str]:
    if compared.mixes_programs:
        yield "some run programs of one's own and some a method: check that the workloads match"


def _check_scenarios(compared: _Compared) -> Iterator[str]:
    for key, values in compared.differences.items():
        if not compared.is_intended(key):
            shown = " | ".join("–" if value is None else str(value) for value in values)
            yield f"the scenarios differ in {key}: {shown}"


def _check_verdicts(compared: _Compared) -> Iterator[str]:
    for label, group in compared.groups.items():
        doubtful = [run for run in group if not run.metrics["trusted"]]
        if doubtful:
            name = (
                label
                if len(group) == 1
                else f"{label}: {len(doubtful)} of {len(group)} runs"
            )
            verb = "are" if len(doubtful) > 1 else "is"
            yield f"{name} {verb} not trusted: {doubtful[0].metrics['verdict']['summary']}"


def _check_congestion_control(compared: _Compared) -> Iterator[str]:
    emulated = [
        run.outcome.fidelity
        for run in compared.runs
        if run.outcome.runtime == "emulate"
    ]
    algorithms = {
        fidelity.get("congestion_control", "that of the host") for fidelity in emulated
    }
    if len(algorithms) > 1:
        yield f"TCP's congestion control differs between the runs: {', '.join(sorted(algorithms))}"


def _check_processors(compared: _Compared) -> Iterator[str]:
    known = [
        run for run in compared.runs if run.manifest.get("host", {}).get("computing")
    ]
    computing = {_computed_on(run) for run in known}
    if len(computing) > 1:
        yield f"losses and weights may differ, since the runs computed on {' | '.join(sorted(computing))}"


def _check_revisions(compared: _Compared) -> Iterator[str]:
    if len({run.manifest.get("revision") for run in compared.runs}) > 1:
        yield "the runs were made by different revisions of the testbed"


_CHECKS = (
    _check_tasks,
    _check_scenarios,
    _check_verdicts,
    _check_congestion_control,
    _check_processors,
    _check_revisions,
)


def _computed_on(run: Run) -> str:
    """Return the processors, instruction sets and torch versions that a run's numerics depend on."""
    fixed = " with fixed kernels" if run.trial.scenario.workload.is_reproducible else ""
    return kernels.named(run.manifest["host"]["computing"]) + fixed


def _compare_clocks(
    runs: Sequence[Run], differences: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Compare the first emulated with the first simulated run of one scenario."""
    first_runs: dict[str, Run] = {}
    for run in runs:
        if run.metrics.get("step_time", run.metrics.get("latency")) is not None:
            first_runs.setdefault(run.outcome.runtime, run)
    if len(first_runs) < 2 or any(key != "name" for key in differences):
        return None
    figure = "step_time" if "step_time" in first_runs["emulate"].metrics else "latency"
    emulated, simulated = (
        first_runs["emulate"].metrics.get(figure),
        first_runs["simulate"].metrics.get(figure),
    )
    if emulated is None or not simulated:
        return None
    ratio = emulated / simulated
    return {
        "figure": figure,
        "emulated": emulated,
        "simulated": simulated,
        "ratio": ratio,
        "agree": abs(ratio - 1) <= TWO_CLOCKS,
    }
