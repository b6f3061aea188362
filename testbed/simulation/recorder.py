"""Where the events of a simulation go: into the log, and before those who watch it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from testbed.trace.events import Event
from testbed.trace.log import EventLog, Form, Row

Watch = Callable[[Event], None]


class Recorder:
    """Appends to the log; ``on_event`` sees each event after that, or those of some ``names``."""

    def __init__(self, on_event: Watch | None = None, names: Collection[str] | None = None) -> None:
        self.events = EventLog()
        self._append = self.events.add
        self._on_event = [] if on_event is None else [(on_event, names)]
        self._watches = self._on_event
        self._seen = frozenset[str]()
        """Names of the events that somebody sees; no other `Event` is made."""
        self._all = False
        """Whether somebody sees all events."""
        self.observe(None)

    def observe(self, watch: Watch | None, names: Collection[str] = ()) -> None:
        """Let ``watch`` see the events of these names right after they are written; it may strike at once."""
        self._watches = self._on_event if watch is None else [*self._on_event, (watch, names)]
        self._all = any(seen is None for _, seen in self._watches)
        self._seen = frozenset[str]().union(*(seen or () for _, seen in self._watches))

    def add(self, form: Form, row: Row) -> None:
        """Append an event by its form."""
        self._append(form, row)
        if self._all or form[0] in self._seen:
            self._show(Event(row[0], row[1], form[0], dict(zip(form[1], row[2:], strict=True))))

    def write(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if self._all or event.event in self._seen:
            self._show(event)

    def _show(self, event: Event) -> None:
        for watch, names in self._watches:
            if names is None or event.event in names:
                watch(event)
