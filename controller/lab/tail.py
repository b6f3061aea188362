"""Files that grow while they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """Reads a growing file of JSON lines, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> list[Any]:
        """Return the lines since the last call; nothing of a file that is not there yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
