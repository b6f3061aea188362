"""Executor on a Dask cluster: workers simulate trials and return their results folders."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from testbed.common import plugins
from testbed.common.errors import HostError, InputError, TestbedError
from testbed.common.version import VERSION
from testbed_controller.api.execution import DEFAULTS, RunOptions
from testbed_controller.api.executors import Done, PlannedRun, collect, simulate_trial

if TYPE_CHECKING:
    from distributed import Client

    from testbed.scenario.schema import Trial

CONNECT_TIMEOUT = 10
"""Seconds for a scheduler to answer."""
WORKER_TIMEOUT = 600.0
"""Seconds for which a cluster may be without any worker: long enough to start new ones."""
MAX_DEATHS = 3
"""Number of workers that may die while they execute a run; the run is then given up."""
_SIMULATION_LOCK = threading.Lock()
"""Held by the simulation in a worker process: user code and random numbers are global in a process, and a worker may
have several threads."""

Files = dict[str, bytes]
"""Files of a folder by relative name."""


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Connect to the scheduler at an address like ``tcp://10.0.0.1:8786`` within the block.

    Raises InputError if the extra ``cluster`` is not installed, HostError if no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise InputError(
            "--cluster: install the extra for it: pip install 'edge-testbed[cluster]'"
        ) from None
    try:
        client = Client(address, timeout=CONNECT_TIMEOUT)
    except (OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise HostError(
            f"--cluster: no Dask scheduler answers at {address} ({reason}): start one with 'dask scheduler', and on "
            f"each machine workers with 'dask worker {address} --nworkers N --nthreads 1'"
        ) from None
    with client:
        yield client


@dataclass(frozen=True)
class Cluster:
    """Simulate runs on the workers of a cluster, and store the returned folders.

    A task is one attempt of a run. If its worker dies, the run is attempted again on another worker; after `MAX_DEATHS`
    deaths the run is given up, and named at the end. Dask blames the death of a worker on every task assigned to it,
    also on tasks that were waiting. Each run therefore counts its own starts in a queue on the scheduler, and a run
    that Dask abandons after fewer starts is submitted again.
    """

    scheduler: Client | str
    """A client, or the address of a scheduler."""
    options: RunOptions = DEFAULTS

    def execute(
        self, runs: Mapping[int, PlannedRun], console: Console, done: Done
    ) -> None:
        """Execute all runs; see `Executor.execute`.

        Raises HostError for a cluster without workers (at the start, or later for `WORKER_TIMEOUT`) or with another
        version of the testbed; InputError for files that cannot be sent; TestbedError for runs that were given up.
        """
        # Packed before connecting: files that cannot be sent are an error of the input in any state of the cluster.
        packed = {number: _pack_trial(run.trial) for number, run in runs.items()}
        with self._connect() as client:
            _check_workers(client)
            workers = f"{_count_workers(client)} workers of {client.scheduler.address}"
            console.print(f"{len(runs)} runs on {workers}")
            with _limited_deaths(client):
                _Batch(runs, packed, client, console, self.options).execute(done)

    def _connect(self) -> AbstractContextManager[Client]:
        if isinstance(self.scheduler, str):
            return connected(self.scheduler)
        # A client that the user passed stays open.
        return nullcontext(self.scheduler)


class _Batch:
    """The tasks of some runs on a cluster."""

    def __init__(
        self,
        runs: Mapping[int, PlannedRun],
        packed: Mapping[int, tuple[Trial, Files]],
        client: Client,
        console: Console,
        options: RunOptions,
    ) -> None:
        self._runs = runs
        self._packed = packed
        self._options = options
        self._client = client
        self._console = console
        self._executor = client.get_executor(pure=False)
        # Distinguishes the queues and keys of this batch from those of other clients.
        self._id = secrets.token_hex(4)
        self._version = version()
        self._attempts = Counter[int]()
        self._given_up: list[str] = []

    def execute(self, done: Done) -> None:
        try:
            collect(
                self._runs,
                self._submit_run,
                self._store_result,
                self._console,
                done,
                check_loss=self._check_loss,
                # While there is no worker, one task waits for the first.
                max_running=lambda: max(1, _count_workers(self._client)),
                on_poll=_Watch(self._client, self._console),
            )
        except BaseException:
            # Cancels the submitted tasks.
            self._executor.shutdown(wait=False)
            raise
        if self._given_up:
            raise TestbedError(
                f"{len(self._given_up)} of {len(self._runs)} runs were lost with their workers {MAX_DEATHS} times "
                f"({', '.join(self._given_up)}): check the memory and logs of the workers, then continue with --resume"
            )

    def _start_counter(self, number: int) -> str:
        """Return the name of the queue counting the starts of a run."""
        # Folders of different parents may have the same name.
        return f"{self._runs[number].folder.name}-{number}-{self._id}"

    def _submit_run(self, number: int) -> Future[Files]:
        self._attempts[number] += 1
        counter = self._start_counter(number)
        trial, files = self._packed[number]
        submitted: Future[Files] = self._executor.submit(
            _run_task,
            _simulate_files,
            counter,
            trial,
            files,
            list(sys.argv),
            self._version,
            str(self._runs[number].folder.absolute()),
            self._options,
            # Dask returns the old result of a known key, so each attempt has its own.
            key=f"{counter}-{self._attempts[number]}",
        )
        return submitted

    def _store_result(self, number: int, ended: Future[Files]) -> Path:
        """Write the files of a finished run to a draft and rename the draft, so the folder appears with all files."""
        folder = self._runs[number].folder
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        _write_files(ended.result(), draft)
        if folder.is_dir():
            shutil.rmtree(folder)
        draft.rename(folder)
        return folder

    def _check_loss(
        self, number: int, ended: Future[Files]
    ) -> Literal["again", "given up"] | None:
        """Choose between repeating and giving up a run whose task ended because workers died; otherwise return None."""
        from distributed import KilledWorker, Queue

        if not isinstance(ended.exception(), KilledWorker):
            return None
        if Queue(self._start_counter(number), client=self._client).qsize() < MAX_DEATHS:
            return "again"
        name = self._runs[number].folder.name
        self._given_up.append(name)
        self._console.print(f"{name} is given up: {MAX_DEATHS} of its workers died")
        return "given up"


class _Watch:
    """Detects the loss of all workers. A call raises HostError `WORKER_TIMEOUT` after the loss."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console
        self._lost_since: float | None = None
        """Monotonic instant of the first call without workers; None with workers."""

    def __call__(self) -> None:
        if _count_workers(self._client):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
            self._console.print(
                f"no worker is left: waiting {WORKER_TIMEOUT:.0f} s for a new one; start it with 'dask worker'"
            )
        elif time.monotonic() - self._lost_since > WORKER_TIMEOUT:
            raise HostError(
                f"--cluster: no worker for {WORKER_TIMEOUT:.0f} s: start workers, then continue with --resume"
            )


def _count_workers(client: Client) -> int:
    # -1 asks for all workers; by default Dask describes five.
    return len(client.scheduler_info(n_workers=-1)["workers"])


# Once in a process, which keeps the code that it has imported even if the files change.
@functools.cache
def version() -> str:
    """Return the version of the testbed with a hash of the Python files of the testbed and of packages with methods.

    Workers with another version are refused, because their results may differ. Libraries such as torch are not
    compared; manifest.json names their versions.
    """
    digest = hashlib.sha256()
    names = {"testbed", "testbed_controller"}
    for point in plugins.installed("testbed.methods").values():
        names.add(point.module.partition(".")[0])
    for name in sorted(names):
        spec = importlib.util.find_spec(name)
        # The package is broken; a scenario that needs it reports the error.
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        is_package = bool(spec.submodule_search_locations)
        files = sorted(origin.parent.rglob("*.py")) if is_package else [origin]
        for path in files:
            digest.update(path.relative_to(origin.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return f"{VERSION}-{digest.hexdigest()[:8]}"


def _check_workers(client: Client) -> None:
    """Raise HostError for missing workers or another version."""
    ours = version()
    try:
        versions: Mapping[str, str] = client.run(_version_there)
    except Exception as error:  # noqa: BLE001 - a worker without the testbed may raise anything
        raise HostError(
            f"--cluster: a worker cannot run the testbed ({error}): install {ours} on all of them"
        ) from None
    if not versions:
        raise HostError(
            "--cluster: the scheduler has no workers: start them with 'dask worker ADDRESS --nthreads 1'"
        )
    for worker, theirs in versions.items():
        if theirs != ours:
            raise HostError(
                f"--cluster: worker {worker} has testbed {theirs}, this machine {ours}: install one version, and "
                "restart the workers"
            )


def _version_there() -> str:
    # Sent by name, so that a worker calls its own `version`.
    return version()


@contextmanager
def _limited_deaths(client: Client) -> Iterator[None]:
    """Limit the deaths of workers for each task within the block; the scheduler may be shared with other users."""
    before = client.run_on_scheduler(_limit_failures, at_most=MAX_DEATHS - 1)
    try:
        yield
    finally:
        # A scheduler that has ended does not answer.
        if client.status == "running":
            client.run_on_scheduler(_allow_failures, failures=before)


def _limit_failures(dask_scheduler: Any, at_most: int) -> int:
    """Limit the number of deaths a task may survive; return the former limit."""
    before: int = dask_scheduler.allowed_failures
    dask_scheduler.allowed_failures = min(before, at_most)
    return before


def _allow_failures(dask_scheduler: Any, failures: int) -> None:
    dask_scheduler.allowed_failures = failures


def _pack_trial(trial: Trial) -> tuple[Trial, Files]:
    """Return a trial with relative file names, and the Python files named in the trial."""
    from testbed_controller.results.recorder import with_local_sources

    scenario = trial.scenario
    for key, named in scenario.workload.paths():
        if named is not None and not Path(named).is_absolute():
            raise InputError(
                f"--cluster: workload.{key}: {named} is not sent to workers: give an absolute path that all have"
            )
    moved, sources = with_local_sources(scenario)
    experiment = replace(trial.experiment, workload=moved.workload)
    files = {name: text.encode() for name, text in sources.items()}
    return replace(trial, scenario=moved, experiment=experiment), files


def _write_files(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _run_task(simulate: Callable[..., Files], counter: str, *arguments: Any) -> Files:
    """Count the start of a run in the queue ``counter``, then return the result of ``simulate(*arguments)``."""
    from distributed import Queue

    with _SIMULATION_LOCK:
        Queue(counter).put(1)
        return simulate(*arguments)


def _simulate_files(
    trial: Trial,
    files: Files,
    argv: Sequence[str],
    required_version: str,
    final_folder: str,
    options: RunOptions,
) -> Files:
    """Simulate a trial in a worker and return the files for ``final_folder`` on the machine of the client."""
    # This may be a worker that joined after `_check_workers`. A repeated run would soon return to this idle worker.
    if version() != required_version:
        raise HostError(
            f"--cluster: a new worker has testbed {version()}, the run requires {required_version}: install one "
            "version, restart the worker, then continue with --resume"
        )
    with tempfile.TemporaryDirectory(prefix="testbed-") as name:
        _write_files(files, Path(name))
        source = replace(trial.scenario.source, file=str(Path(name, "scenario.yaml")))
        trial = replace(trial, scenario=trial.scenario.with_source(source))
        # The manifest records the command line of the user, not that of the worker.
        own_argv = sys.argv
        sys.argv = list(argv)
        try:
            folder = simulate_trial(trial, Path(name, "run"), options)
        finally:
            sys.argv = own_argv
        contents = {}
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                # Pages contain the path of the results folder.
                if path.suffix == ".html":
                    content = content.replace(
                        str(folder).encode(), final_folder.encode()
                    )
                contents[str(path.relative_to(folder))] = content
    return contents
