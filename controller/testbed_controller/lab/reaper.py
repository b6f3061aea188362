"""A small process that outlives the controller just long enough to remove a run that the controller left behind.

It waits on a pipe whose other end only the controller holds. However the controller ends, SIGKILL included, the
kernel closes that end, and the reaper removes the run, as soon as the engine answers. It is dismissed only by who has
seen that the engine holds nothing of the run any more, or has a lab that is to outlive its controller.

Controller and reaper hold a lock together, on a file beside the run's state file. Where nobody holds it any more both
were killed, and the run is abandoned.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from testbed_controller.lab.paths import ROOT, disown, own, state_folder

_DISMISSED = b"dismissed"
_PAUSE = 2.0
"""Seconds between two attempts to remove a run whose engine does not answer."""
_PATIENCE = 24 * 3600.0


_UNSURE: list[Reaper] = []
"""Reapers that are to look again when this process has ended."""


class Reaper:
    """Watches over a run from before anything of it exists."""

    def __init__(self, run: str, program: str = "testbed_controller.lab.reaper") -> None:
        """``program`` is the module whose `main` is the reaper."""
        self._run = run
        self._lock = own(run)
        with (state_folder() / "reaper.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, run],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock],
                start_new_session=True,  # the terminal's Ctrl-C and hang-up are not for it
            )

    def remove(self, remove: Callable[[], object], *, sure: bool = True) -> bool:
        """Remove the run; return False where that fails or is interrupted, and the reaper goes on with it alone.

        Unless it is ``sure`` that nothing of the run is still being made, the reaper looks again after this process.
        """
        from testbed.common.errors import TestbedError

        try:
            remove()
            done = True
        except (TestbedError, KeyboardInterrupt):
            done = False
        if not sure:
            _UNSURE.append(self)  # requests under way are over only when this process is
        elif done:
            self.dismiss()
        else:
            self._end()
        return done and sure

    @contextmanager
    def guarding(self, remove: Callable[[], object], keep: bool) -> Iterator[None]:
        """Remove the run where it cannot be made, or that is interrupted; let it be if it is there to ``keep``."""
        try:
            yield
        except BaseException as error:
            self.remove(remove, sure=not isinstance(error, KeyboardInterrupt))
            raise
        if keep:
            self.dismiss()

    def dismiss(self) -> None:
        """Let the run be: nothing of it is left, or all of it is to stay."""
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody ended the reaper
            self._process.stdin.write(_DISMISSED)
            self._process.stdin.flush()
        self._end()
        self._process.wait()
        disown(self._run)

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        os.close(self._lock)


def main(run: str, remove: Callable[[str], object]) -> None:
    """Wait for the controller's end of the pipe to close; remove the run unless dismissed."""
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
    print(f"{run}: its controller is gone; removed {removed} containers and networks", flush=True)


def _remove(run: str) -> int:
    # Imported only now: for the length of a run this process should be small.
    from testbed_controller.lab.engine import connect_to_run
    from testbed_controller.lab.removal import remove_run

    return remove_run(connect_to_run(run), run)


if __name__ == "__main__":
    main(sys.argv[1], _remove)
