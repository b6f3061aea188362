"""The reaper: a process that removes a run if the run's controller ends without removing it.

The reaper waits on a pipe whose other end only the controller holds. However the controller ends, even by SIGKILL, the
kernel closes the pipe, and the reaper removes the run as soon as the engine responds. The controller dismisses the
reaper after removing the run, and for a lab that should outlive its controller.

Controller and reaper share a lock on a file beside the run's state file (`testbed_controller.lab.paths.lock_run`). If
the lock is free, both were killed and the run is orphaned.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from testbed_controller.lab.paths import ROOT, lock_run, state_folder, unlock_run

_DISMISSED = b"dismissed"
_RETRY_PAUSE = 2.0
"""Pause between two attempts to remove a run while its engine does not respond, in seconds."""
_PATIENCE = 24 * 3600.0
"""Time for which a reaper retries while the engine does not respond, in seconds."""


_CONTINUING: list[Reaper] = []
"""Reapers that remove the run again after this process has ended.

The list keeps them alive, because the pipe of a deleted reaper would be closed too early."""


class Reaper:
    """The controller's side of a reaper process, which is started before any part of the run exists."""

    def __init__(
        self, run: str, program: str = "testbed_controller.lab.reaper"
    ) -> None:
        """``program`` is the module whose `main` the process runs."""
        self._run = run
        # The reaper process inherits the lock, which is free only after both processes have ended.
        self._lock = lock_run(run)
        with (state_folder() / "reaper.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, run],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock],
                start_new_session=True,  # protects from the terminal's Ctrl-C and hang-up
            )

    def remove(
        self, remove: Callable[[], object], *, no_requests_active: bool = True
    ) -> bool:
        """Remove the run; return False after a failure or an interruption, when the reaper continues alone.

        Without ``no_requests_active``, other threads may still create parts of the run. Then the reaper removes the
        run again after this process has ended.
        """
        from testbed.common.errors import TestbedError

        try:
            remove()
            was_removed = True
        except (TestbedError, KeyboardInterrupt):
            was_removed = False
        if not no_requests_active:
            _CONTINUING.append(self)  # the end of this process ends active requests
        elif was_removed:
            self.dismiss()
        else:
            self._close_pipe()
        return was_removed and no_requests_active

    @contextmanager
    def guarding(self, remove: Callable[[], object], *, keep: bool) -> Iterator[None]:
        """Remove the run if the block fails or is interrupted; with ``keep``, dismiss the reaper after the block."""
        try:
            yield
        except BaseException as error:
            # After an interruption, requests of other threads may still be on their way to the engine.
            self.remove(
                remove, no_requests_active=not isinstance(error, KeyboardInterrupt)
            )
            raise
        if keep:
            self.dismiss()

    def dismiss(self) -> None:
        """End the reaper: the run is removed, or is meant to stay."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the reaper was killed
            self._process.stdin.write(_DISMISSED)
            self._process.stdin.flush()
        self._close_pipe()
        self._process.wait()
        unlock_run(self._run)

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        os.close(self._lock)


def main(run: str, remove: Callable[[str], object]) -> None:
    """Wait until the controller's end of the pipe closes, and remove the run unless dismissed."""
    # Signals that end the controller and all its processes must not end the reaper.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == _DISMISSED:
        return
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            removed = remove(run)
            break
        except Exception as error:
            print(f"{run}: {error}", flush=True)
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY_PAUSE)
    text = f"{run}: the controller has ended; removed {removed} containers and networks"
    print(text, flush=True)


def _remove_run(run: str) -> int:
    # Late imports keep the process small during the run.
    from testbed_controller.lab.engine import connect_to_run
    from testbed_controller.lab.removal import remove_run

    return remove_run(connect_to_run(run), run)


if __name__ == "__main__":
    main(sys.argv[1], _remove_run)
