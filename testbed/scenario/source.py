"""Where each key of a scenario was written, so that an error found late still names file and line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.common.errors import Diagnostic, InputError, Key


@dataclass(frozen=True)
class Source:
    """A scenario file as it was read."""

    file: str
    """The file's name as the user wrote it."""
    lines: Mapping[Key, int] = field(default_factory=dict)
    """Line of each key and list item, counted from 1."""
    overrides: Mapping[Key, str] = field(default_factory=dict)
    """Keys that something else than the file set, with what that was."""

    @property
    def folder(self) -> Path:
        """Where relative paths in the scenario begin."""
        return Path(self.file).parent

    def _closest(self, key: Key) -> Key | None:
        """Return the key whose place is known: the key itself, what was set inside it, or what is around it."""
        if self._known(key):
            return key
        inside = next((way for way in self.overrides if way[: len(key)] == key), None)
        around = (key[:end] for end in range(len(key) - 1, -1, -1))
        return inside or next((way for way in around if self._known(way)), None)

    def _known(self, key: Key) -> bool:
        """Say whether the key's own place is known: what is in one that something else set is not in the file."""
        return key in self.overrides or (
            key in self.lines and not any(key[:end] in self.overrides for end in range(len(key)))
        )

    def where(self, key: Key) -> str:
        """Return ``file:line`` of the key, or of the closest key around it."""
        known = self._closest(key)
        if known is None:
            return self.file
        return self.overrides.get(known) or f"{self.file}:{self.lines[known]}"

    def override(self, values: Mapping[Key, str]) -> Source:
        """Return the source with these keys, and all that is in them, set by something else."""
        return replace(self, overrides={**self.overrides, **values})

    def error(self, problems: Iterable[Diagnostic]) -> InputError:
        """Return the error for these problems: one line each, in the order of the file."""

        def order(problem: Diagnostic) -> int:
            known = self._closest(problem.key)
            return self.lines.get(known, 0) if known is not None else 0

        lines = [f"{self.where(problem.key)}: {problem}" for problem in sorted(problems, key=order)]
        return InputError("\n".join(dict.fromkeys(lines)))
