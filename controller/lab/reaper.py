"""A small process that outlives the controller just long enough to remove a run that the controller left behind.

It waits on a pipe whose other end only the controller holds. However the controller ends, SIGKILL included, the
kernel closes that end, and the reaper removes the run, unless it was dismissed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from controller.lab.paths import CHECKOUT, state_folder

_DISMISSED = b"dismissed"


@contextmanager
def guard(run: str, *, keep: bool = False) -> Iterator[None]:
    """Have the run removed if this process dies within the block.

    Leaving the block in any orderly way, by an exception too, dismisses the reaper: the caller removes the run.
    With ``keep`` the run is to outlive this process, and nothing is watched.
    """
    if keep:
        yield
        return
    with (state_folder() / "reaper.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller.lab.reaper", run],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C and hang-up are not for it
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody ended the reaper; the caller removes the run all the same
            process.stdin.write(_DISMISSED)
            process.stdin.close()
        process.wait()


def main(run: str) -> None:
    """Wait for the controller's end of the pipe to close; remove the run unless dismissed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == _DISMISSED:
        return
    # Imported only now: for the length of a run this process should be small.
    from controller.lab.engine import connect
    from controller.lab.removal import remove_run

    removed = remove_run(connect(), run)
    print(f"{run}: its controller is gone; removed {removed} containers and networks", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
