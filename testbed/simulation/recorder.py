"""Where the events of a simulation go: into the log, and before those who watch it."""

from __future__ import annotations

from collections.abc import Callable

from testbed.trace.events import Event
from testbed.trace.log import EventLog, Form, Row


class Recorder:
    """Appends to the log; ``on_event`` sees each event after that."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events = EventLog()
        self._append = self.events.add
        self._on_event = on_event
        self._watch: Callable[[Event], None] | None = None
        self._seen = on_event is not None
        """Whether anybody sees events, so that they have to be made."""

    def observe(self, watch: Callable[[Event], None] | None) -> None:
        """Let ``watch`` see every event right after it is written; it may strike at once."""
        self._watch = watch
        self._seen = watch is not None or self._on_event is not None

    def add(self, form: Form, row: Row) -> None:
        """Append an event by its form; no `Event` is made where nobody sees it right away."""
        if self._seen:
            self.write(Event(row[0], row[1], form[0], dict(zip(form[1], row[2:], strict=True))))
        else:
            self._append(form, row)

    def write(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        if self._watch is not None:
            self._watch(event)
