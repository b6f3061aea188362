"""A small process that outlives a controller just long enough to remove a run that the controller left behind.

The reaper waits on a pipe whose other end only the controller holds. However the controller ends, even by SIGKILL, the
kernel closes the pipe, and the reaper removes the run as soon as the engine responds. It is dismissed after the
controller has removed the run, or when a lab is meant to outlive its controller.

Controller and reaper share a lock on a file beside the run's state file. If the lock is free, both were killed and the
run is abandoned.
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
_PAUSE = 2.0
"""Pause between two attempts to remove a run while its engine does not respond, in seconds."""
_PATIENCE = 24 * 3600.0
"""Time for which a reaper retries while the engine does not respond, in seconds."""


_UNSURE: list[Reaper] = []
"""Reapers that check again after the end of this process."""


class Reaper:
    """The guardian of a run, started before anything of the run exists."""

    def __init__(
        self, run: str, program: str = "testbed_controller.lab.reaper"
    ) -> None:
        """``program`` is the module whose `main` the process runs."""
        self._run = run
        # The process inherits the lock, which is free only after both have ended.
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

    def remove(self, remove: Callable[[], object], *, sure: bool = True) -> bool:
        """Remove the run; return False after a failure or an interruption, when the reaper continues alone.

        Unless it is ``sure`` that no request is still creating parts of the run, the reaper checks again after this
        process.
        """
        from testbed.common.errors import TestbedError

        try:
            remove()
            done = True
        except (TestbedError, KeyboardInterrupt):
            done = False
        if not sure:
            _UNSURE.append(self)  # active requests end with this process
        elif done:
            self.dismiss()
        else:
            self._close_pipe()
        return done and sure

    @contextmanager
    def guarding(self, remove: Callable[[], object], *, keep: bool) -> Iterator[None]:
        """Remove the run after a failed or interrupted creation; with ``keep``, dismiss the reaper after a success."""
        try:
            yield
        except BaseException as error:
            # After an interruption, requests of other threads may still be on their way to the engine.
            self.remove(remove, sure=not isinstance(error, KeyboardInterrupt))
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
    # Whatever ends the controller's process group must not end its reaper as well.
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
            time.sleep(_PAUSE)
    text = f"{run}: the controller has ended; removed {removed} containers and networks"
    print(text, flush=True)


def _remove_run(run: str) -> int:
    # Late imports keep the process small during the run.
    from testbed_controller.lab.engine import connect_to_run
    from testbed_controller.lab.removal import remove_run

    return remove_run(connect_to_run(run), run)


if __name__ == "__main__":
    main(sys.argv[1], _remove_run)
