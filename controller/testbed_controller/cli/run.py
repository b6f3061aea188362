"""`testbed run`: execute a scenario in containers or on the virtual clock, from the file to the report.

A scenario has several runs if it has a sweep or repetitions. A `Trial` is one of them as data; a `PlannedRun` adds its
plan and its results folder; an executor runs the planned ones in turn or in parallel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape

from testbed.common.errors import InputError
from testbed.common.formats import escape_control
from testbed.ml import kernels
from testbed.prepare import prepare_all, raise_refused
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import Trial
from testbed_controller.api.execution import RunOptions, Runtime
from testbed_controller.api.executors import (
    Executor,
    InTurn,
    OneRunPerHost,
    PlannedRun,
    Processes,
)
from testbed_controller.cli.finished import explaining, judge, show_run, summarize
from testbed_controller.cli.options import (
    accept_links_option,
    links_option,
    metrics_json_option,
    on_hosts,
    out_option,
    overrides_option,
    watch_option,
)
from testbed_controller.cli.printing import dump, make_console
from testbed_controller.results.exporters import find_stream
from testbed_controller.results.files import keep_finished_runs
from testbed_controller.results.recorder import create_numbered_folder
from testbed_controller.results.run import Run, run_names

if TYPE_CHECKING:
    from testbed.scenario.schema import Scenario
    from testbed_controller.hosts.lab import AnyLab
    from testbed_controller.hosts.placement import LabPart

WEIGHTS = "weights.safetensors"
"""File name of the weights in the results of a run."""


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `testbed run`."""

    scenario: str
    runtime: Runtime
    out: Path | None
    resume: Path | None
    jobs: int
    cluster: str | None
    overrides: tuple[str, ...]
    seed: int | None
    repetitions: int | None
    links: str
    accept_links: bool
    where: LabPart
    """Hosts, and the placement of devices on them."""
    one_run_per_host: bool
    weights: Path | None
    streams: tuple[str, ...]
    """Names of live exporters."""
    watch: bool
    events: bool
    keep: bool
    lab: str | None
    """Name of the running lab to use: empty for the only one, None to create the devices of each run."""
    as_json: bool

    def execute(self) -> None:
        """Run all pending runs of the scenario and print their results."""
        self.check()
        loaded = load(self.scenario, self.changes)
        planned = self._selected_trials(loaded)
        prepared, refused = prepare_all(planned)
        console = make_console(stderr=self.as_json)
        _print_refused(console, refused)
        folders = self._run_folders(planned)
        finished: dict[int, Run] = {}
        if self.resume is not None:
            finished = keep_finished_runs(folders, planned)
            console.print(f"{len(finished)} of {len(folders)} runs are already present")
        has_several_runs = len(planned) > 1
        pending = {}
        for number, each in prepared.items():
            if number not in finished:
                pending[number] = PlannedRun(each, folders[number])

        def on_finish(number: int, run: Run) -> None:
            # The events of all runs of a sweep may exceed the memory.
            finished[number] = run.without_events() if has_several_runs else run
            if not self.as_json:
                show_run(console, run, brief=has_several_runs)

        if pending:
            executor = self.executor(self._open_lab(planned[0]))
            with explaining(console):
                executor.execute(pending, console, on_finish)
        # Parallel runs finish in any order, and the summary is in the order of the points.
        in_order = [finished[number] for number in sorted(finished)]
        _show_all(in_order, console, as_json=self.as_json)
        raise_refused(refused)

    def check(self) -> None:
        """Raise InputError for incompatible options."""
        # An unknown exporter is refused before the first run, not at its start.
        for name in self.streams:
            find_stream(name)
        if self.resume is not None and self.out is not None:
            raise InputError("--out cannot be combined with --resume")
        if self.watch and not self.events:
            raise InputError(
                "--no-events cannot be combined with --watch, whose page needs events"
            )
        if self.lab is not None:
            self._check_lab()
        if self.one_run_per_host:
            self._check_one_run_per_host()
        if self._parallel_option:
            self._check_parallel(self._parallel_option)

    def _check_lab(self) -> None:
        """Raise InputError for options unavailable to a run on an existing lab."""
        conflicts = {
            "--runtime simulate": self.runtime == "simulate",
            "--resume": self.resume is not None,
            self._parallel_option: bool(self._parallel_option),
            "--hosts": bool(self.where.hosts),
            "--keep": self.keep,
        }
        for option, is_used in conflicts.items():
            if is_used:
                raise InputError(
                    f"--on cannot be combined with {option}: remove one of the two"
                )

    def _check_one_run_per_host(self) -> None:
        if not self.where.hosts or self.runtime != "emulate":
            raise InputError(
                "--each-on-one-host requires runs in containers on several hosts: name the hosts with --hosts"
            )
        if self.where.place or self.where.faults or self.keep:
            text = "places all devices of a run on one host: remove --place, faults of hosts and --keep"
            raise InputError(f"--each-on-one-host: {text}")

    def _check_parallel(self, option: str) -> None:
        """Raise InputError for options unavailable to parallel runs; ``option`` makes the runs parallel."""
        if option in ("--cluster", "--jobs") and self.runtime != "simulate":
            text = "containers need the host to themselves: add --runtime simulate, or remove"
            raise InputError(f"{option}: {text} {option}")
        if self.watch or self.streams:
            raise InputError(
                f"{option}: parallel runs can be neither watched nor streamed: remove {option}"
            )

    @property
    def _parallel_option(self) -> str:
        """The option by which several runs are executed at once; empty without one."""
        if self.cluster:
            return "--cluster"
        if self.jobs > 1:
            return "--jobs"
        return "--each-on-one-host" if self.one_run_per_host else ""

    @property
    def changes(self) -> list[str]:
        """The changes of the scenario by `--set` and then by options like `--seed`, as ``KEY=VALUE``."""
        changes = [*self.overrides]
        if self.seed is not None:
            changes.append(f"seed={self.seed}")
        if self.repetitions is not None:
            changes.append(f"repetitions={self.repetitions}")
        if self.weights is not None:
            # In quotes, since YAML gives characters such as `#` and `: ` a meaning.
            path = json.dumps(str(_weights_file(self.weights).absolute()))
            changes.append(f"workload.model.weights={path}")
        return changes

    def _open_lab(self, trial: Trial) -> AnyLab | None:
        """Open the running lab, after checking the devices and the network against the trial."""
        if self.lab is None:
            return None
        from testbed_controller.hosts.lab import open_lab
        from testbed_controller.lab import runstate

        lab = open_lab(runstate.choose(self.lab or None))
        lab.check_compatible(trial)
        return lab

    def executor(self, lab: AnyLab | None = None) -> Executor:
        """Return the executor selected by the options."""
        parallel_option = self._parallel_option
        if parallel_option == "--cluster":
            from testbed_controller.api.cluster import Cluster

            return Cluster(str(self.cluster), RunOptions(events=self.events))
        if parallel_option == "--jobs":
            return Processes(self.jobs, RunOptions(events=self.events))
        options = RunOptions(
            events=self.events,
            watch=self.watch,
            streams=self.streams,
            links=self.links,
            accept_links=self.accept_links,
            keep=self.keep,
            placement=self.where,
            existing_lab=lab,
        )
        if parallel_option == "--each-on-one-host":
            return OneRunPerHost(self.where.hosts, options)
        return InTurn(self.runtime, options)

    def _selected_trials(self, loaded: Scenario) -> list[Trial]:
        """Return the trials to run, with the faults of hosts; on a running lab, only the first trial."""
        planned = trials(loaded)
        # The lab has the devices and links of the first point.
        if self.lab is not None:
            return planned[:1]
        # Before anything is prepared, since this process may have to start itself again with other kernels.
        _fix_kernels(planned, self.runtime)
        if self.where.faults and self.runtime == "emulate":
            from testbed_controller.hosts.lab import add_host_faults

            return add_host_faults(planned, self.where)
        return planned

    def _run_folders(self, planned: Sequence[Trial]) -> list[Path]:
        """Return the results folder of each run. Several runs share a parent folder."""
        names = run_names(planned)
        folder = self.resume or self.out
        if len(names) == 1:
            return [folder or create_numbered_folder(Path("results") / names[0])]
        # For a single run, the recorder refuses a folder with contents. For a sweep, it would see only the new
        # subfolders, so the parent folder is checked here.
        out = self.out
        if out is not None and out.is_dir() and any(out.iterdir()):
            raise InputError(
                f"{out}: already exists: name another folder, or continue its runs with --resume"
            )
        if folder is None:
            scenario_name = planned[0].scenario.name
            folder = create_numbered_folder(Path("results") / scenario_name)
        return [folder / name for name in names]


@click.command()
@click.argument("scenario")
@click.option(
    "--runtime",
    type=click.Choice(["emulate", "simulate"]),
    default="emulate",
    show_default=True,
    help="emulate: a container per device on the real clock; simulate: one process on a virtual clock, no Docker.",
)
@out_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Continue the runs of SCENARIO in this folder: finished runs are kept, the others are executed.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of runs of a sweep, or repetitions, to simulate in parallel.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Simulate the runs of a sweep, or repetitions, on the workers of the Dask scheduler at ADDRESS.",
)
@overrides_option
@click.option("--seed", type=click.IntRange(0), help="Override the scenario's seed.")
@click.option(
    "--repetitions",
    type=click.IntRange(1),
    help="Override the number of runs of each point.",
)
@links_option
@accept_links_option
@on_hosts
@click.option(
    "--each-on-one-host",
    "one_run_per_host",
    is_flag=True,
    help="With --hosts, place each run of a sweep, or repetition, on one host, with one run per host at a time.",
)
@click.option(
    "--weights",
    "--from",
    "weights",
    type=click.Path(path_type=Path, exists=True),
    help="Start from these weights: the results of another run, a state_dict (safetensors or torch.save), Darknet's "
    "weights for yolov2, or a scenario, which is simulated first.",
)
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="NAME",
    help="Write losses, accuracies and latencies to the results during the run: csv (stream.csv), tensorboard, mlflow, "
    "wandb (offline), each with its library, or an exporter of an installed package. May be repeated.",
)
@watch_option
@click.option(
    "--events/--no-events",
    default=True,
    help="--no-events omits events.jsonl and trace.json, which take most of the space of long runs.",
)
@click.option(
    "--keep", is_flag=True, help="Keep the containers after the run, for inspection."
)
@click.option(
    "--on",
    "lab",
    is_flag=False,
    flag_value="",
    metavar="[RUN]",
    help="Run the first point on a lab created by `testbed up SCENARIO`, and keep the lab. Its devices and network "
    "must be those of the scenario; everything else may differ.  [without RUN: the only lab that is up]",
)
@metrics_json_option
def run(**arguments: Any) -> None:
    """Run SCENARIO (a file, or a name in scenarios/) and print the results.

    Everything is checked and planned before the first container is created. The exit status is 0 for success, 1 if the
    run or one of its `expect` conditions fails, 2 for invalid input, 3 if this machine cannot execute the scenario, 4
    if training diverges (the loss is not a finite number), and 130 if you interrupt the run.

    \b
    Examples:
      testbed run quickstart
      testbed run quickstart --runtime simulate --set network.link.rate=10mbit
      testbed run my.yaml --repetitions 5 --out results/five
      testbed run my.yaml --repetitions 5 --resume results/five
      testbed up quickstart && testbed run quickstart --on
    """
    if arguments["runtime"] == "simulate":
        _refuse_container_options(click.get_current_context())
    RunRequest(**arguments).execute()


CONTAINER_OPTIONS = {
    "links": "--links",
    "accept_links": "--accept-links",
    "keep": "--keep",
    "hosts": "--hosts",
    "place": "--place",
    "lab_file": "--lab",
}
"""Options without effect on a simulation, by the name of their argument."""


def _refuse_container_options(context: click.Context) -> None:
    """Raise InputError for an option about containers on the command line of a simulation."""
    for argument, option in CONTAINER_OPTIONS.items():
        # An environment variable such as TESTBED_HOSTS is accepted, as it may be set for all commands of a shell.
        if context.get_parameter_source(argument) == ParameterSource.COMMANDLINE:
            raise InputError(
                f"{option} cannot be combined with --runtime simulate, which has no containers: remove one of the two"
            )


def _print_refused(console: Console, refused: Sequence[str]) -> None:
    for text in refused:
        console.print(f"[yellow]refused[/] {escape(escape_control(text))}")


def _fix_kernels(trials: Sequence[Trial], runtime: str) -> None:
    """Select portable kernels if a simulation requests reproducibility; containers select their own."""
    if runtime != "simulate":
        return
    if any(each.scenario.workload.is_reproducible for each in trials):
        kernels.fix_or_restart()


def _show_all(runs: list[Run], console: Console, *, as_json: bool) -> None:
    """Print the summary of all runs; exit 1 if any run failed or missed an expectation."""
    folder = runs[0].path.parent if len(runs) > 1 else runs[0].path
    if len(runs) > 1:
        summarize(folder, runs, console)
    if as_json:
        entries = [{"run": str(each.path), "metrics": each.metrics} for each in runs]
        dump(entries[0] if len(runs) == 1 else entries)
    judge(runs)


def _weights_file(path: Path) -> Path:
    """Return the path of a file unchanged; for a results folder, the path of the weights inside."""
    if not path.is_dir():
        return path
    file = path / WEIGHTS
    if not file.is_file():
        # The folder may be that of a sweep.
        runs = [str(each.parent) for each in sorted(path.glob(f"*/{WEIGHTS}"))]
        names = ", ".join(runs) or "none here"
        raise InputError(
            f"--weights: {path} has no {WEIGHTS}: name the results of one run ({names})"
        )
    return file
