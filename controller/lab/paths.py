"""Where the controller keeps what outlives a command: the checkout, its build folder, the user's state folder."""

from __future__ import annotations

import os
from pathlib import Path

from testbed.common.errors import HostError

CHECKOUT = Path(__file__).resolve().parent.parent.parent
BUILD = CHECKOUT / ".build"


def state_folder() -> Path:
    """Return the folder of state files and logs, made with access for its owner only."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(base) / "testbed"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        why = error.strerror or error
        raise HostError(f"{folder}: cannot be made: {why}: name another place by XDG_STATE_HOME") from None
    return folder
