"""Trials of a sweep simulated on the workers of a Dask cluster: the same folders as `simulate_side_by_side` leaves."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from testbed.common.errors import HostError, InputError, TestbedError
from testbed.common.version import VERSION
from testbed_controller.api.execution import Done, simulate_one, take_in
from testbed_controller.lab.paths import package_folder

if TYPE_CHECKING:
    from distributed import Client

    from testbed.scenario.schema import Scenario

SECONDS = 10
"""Seconds for a scheduler to answer."""
PATIENCE = 600.0
"""Seconds for which a cluster may be without any worker."""
DEATHS = 3
"""Workers that died while they ran the same trial, after which that trial is given up."""
_PACKAGES = ("testbed", "testbed_controller")
_ONE_AT_A_TIME = threading.Lock()

Files = dict[str, bytes]
"""Files of a folder, by their names within it."""


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Have a client of the scheduler at an address, such as ``tcp://10.0.0.1:8786``.

    Raises InputError where the extra is not installed, HostError where no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise InputError("--cluster: install the extra for it: pip install 'edge-testbed[cluster]'") from None
    try:
        client = Client(address, timeout=SECONDS)
    except (OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise HostError(
            f"--cluster: no Dask scheduler answers at {address} ({reason}): start one with 'dask scheduler', and on "
            f"each machine workers with 'dask worker {address} --nworkers N --nthreads 1'"
        ) from None
    with client:
        yield client


def simulate_on_cluster(
    scenario: Scenario,
    todo: Mapping[int, Path],
    client: Client,
    console: Console,
    done: Done,
    *,
    events: bool = True,
) -> None:
    """Simulate the trials of these numbers on the workers of a cluster, each as one task, and take in their folders.

    A trial whose worker dies is run by another one; after `DEATHS` deaths it is given up, and said at the end. Dask
    counts a death for all tasks that a worker was to run, so who really began is counted here. Without ``events``
    none are written, nor sent here.
    Raises HostError where there is no worker, none for `PATIENCE` seconds later on, or one has another version of the
    testbed; TestbedError for what is given up.
    """
    from distributed import KilledWorker, Queue

    files, argv, batch = _files_of(scenario), list(sys.argv), secrets.token_hex(4)
    _check(client)
    client.run_on_scheduler(_bound_deaths)
    executor, ours = client.get_executor(pure=False), version()
    console.print(f"{len(todo)} runs on {_workers(client)} workers of {client.scheduler.address}")
    given_up: list[str] = []
    attempts = Counter[int]()

    def submit(number: int) -> Future[Files]:
        attempts[number] += 1
        begun, place = f"{todo[number].name}-{batch}", str(todo[number].absolute())
        key = f"{begun}-{attempts[number]}"
        given = (files, argv, ours, number, place, events)
        submitted: Future[Files] = executor.submit(_task, _simulate, begun, *given, key=key)
        return submitted

    def taken(number: int, ended: Future[Files]) -> Path:
        folder = todo[number]
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        for name, content in ended.result().items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.is_dir():
            shutil.rmtree(folder)
        draft.rename(folder)
        return folder

    def lost(number: int, ended: Future[Files]) -> Literal["again", "given up"] | None:
        if not isinstance(ended.exception(), KilledWorker):
            return None
        name = todo[number].name
        if Queue(f"{name}-{batch}", client=client).qsize() < DEATHS:
            return "again"
        given_up.append(name)
        console.print(f"{name} is given up: {DEATHS} workers died that ran it")
        return "given up"

    try:
        take_in(
            todo,
            submit,
            taken,
            console,
            done,
            lost=lost,
            at_once=lambda: max(1, _workers(client)),
            look=_Watch(client, console),
        )
    except BaseException:
        executor.shutdown(wait=False)  # cancels them
        raise
    if given_up:
        raise TestbedError(
            f"{len(given_up)} of {len(todo)} runs ended with their workers {DEATHS} times ({', '.join(given_up)}): "
            "look at the workers' memory and logs, then go on with --resume"
        )


class _Watch:
    """Says when all workers of a cluster are gone; raises HostError when they stay away for `PATIENCE` seconds."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console
        self._since: float | None = None

    def __call__(self) -> None:
        if _workers(self._client):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
            self._console.print(f"no worker is left: waiting {PATIENCE:.0f} s for one, as started by 'dask worker'")
        elif time.monotonic() - self._since > PATIENCE:
            raise HostError(f"--cluster: no worker for {PATIENCE:.0f} s: start some, then go on with --resume")


def _workers(client: Client) -> int:
    return len(client.scheduler_info(n_workers=-1)["workers"])


def version() -> str:
    """Return the version of the testbed with a hash of its code: two that differ may not compute the same."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        folder = package_folder(package)
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + path.read_bytes())
    return f"{VERSION}-{digest.hexdigest()[:8]}"


def _check(client: Client) -> None:
    """Raise HostError where there is no worker, or one that has another version, or none."""
    ours = version()
    try:
        found: Mapping[str, str] = client.run(_version_there)
    except Exception as error:  # noqa: BLE001 - whatever a worker raises that has none of our code
        raise HostError(
            f"--cluster: a worker cannot run the testbed ({error}): install {ours} on all of them"
        ) from None
    if not found:
        raise HostError("--cluster: no worker is there: start some with 'dask worker ADDRESS --nthreads 1'")
    for worker, theirs in found.items():
        if theirs != ours:
            raise HostError(
                f"--cluster: the worker {worker} has the testbed {theirs}, and here is {ours}: make them one"
            )


def _version_there() -> str:
    return version()


def _bound_deaths(dask_scheduler: Any) -> None:
    """Have a task given up with its third worker: those that a scheduler allows are survived."""
    dask_scheduler.allowed_failures = min(dask_scheduler.allowed_failures, DEATHS - 1)


def _files_of(scenario: Scenario) -> dict[str, str]:
    """Return the texts of a scenario and of the Python files that it names, by what they are called."""
    from testbed_controller.results.recorder import scenario_yaml, with_local_sources

    data, model = scenario.workload.data, scenario.workload.model
    for key, named in (("data.folder", data.folder), ("data.path", data.path), ("model.weights", model.weights)):
        if named is not None and not Path(named).is_absolute():
            raise InputError(f"--cluster: workload.{key}: {named} does not travel: name it by a path of every worker")
    moved, sources = with_local_sources(scenario)
    return {"scenario.yaml": scenario_yaml(moved), **sources}


def _task(simulate: Callable[..., Files], begun: str, *arguments: Any) -> Files:
    """Note in a queue of this name that the trial begins, and simulate it."""
    from distributed import Queue

    # One at a time in a process: user code and random numbers are global in it.
    with _ONE_AT_A_TIME:
        Queue(begun).put(1)
        return simulate(*arguments)


def _simulate(
    files: Mapping[str, str], argv: Sequence[str], wanted: str, number: int, there: str, events: bool
) -> Files:
    """Simulate one trial, in a worker, and return the files of its folder, which is to lie ``there``."""
    if version() != wanted:  # a worker that joined later
        raise HostError(f"this worker has the testbed {version()}, and {wanted} was asked for")
    with tempfile.TemporaryDirectory(prefix="testbed-") as name:
        for file, text in files.items():
            Path(name, file).parent.mkdir(parents=True, exist_ok=True)
            Path(name, file).write_text(text, encoding="utf-8")
        sys.argv, before = list(argv), sys.argv
        try:
            folder = simulate_one(str(Path(name, "scenario.yaml")), [], number, Path(name, "run"), events=events)
        finally:
            sys.argv = before
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # The page says where the run lies.
    return {name: text.replace(str(folder).encode(), there.encode()) for name, text in found.items()}
