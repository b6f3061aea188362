"""Recording of simulation events to the log and to observers."""

from __future__ import annotations

from collections.abc import Callable, Collection

from testbed.trace.events import Event
from testbed.trace.log import EventLog, Form, Row

Watch = Callable[[Event], None]


class Recorder:
    """Event recorder; ``on_event`` sees each event after logging, or only those in ``names``."""

    def __init__(
        self, on_event: Watch | None = None, names: Collection[str] | None = None
    ) -> None:
        self.events = EventLog()
        self._append = self.events.add
        self._on_event = [] if on_event is None else [(on_event, names)]
        self._watches = self._on_event
        self._seen = frozenset[str]()
        """Names of observed events; other events are never materialised."""
        self._all = False
        """Whether somebody sees all events."""
        self.observe(None)

    def observe(self, watch: Watch | None, names: Collection[str] = ()) -> None:
        """Call ``watch`` with each event of the given names after logging; the observer may inject faults at once."""
        self._watches = list(self._on_event)
        if watch is not None:
            self._watches.append((watch, names))
        self._all = any(seen is None for _, seen in self._watches)
        self._seen = frozenset[str]().union(*(seen or () for _, seen in self._watches))

    def add(self, form: Form, row: Row) -> None:
        """Record an event by its form."""
        self._append(form, row)
        if self._all or form[0] in self._seen:
            time, device, *values = row
            name, keys = form
            fields = dict(zip(keys, values, strict=True))
            self._show_event(Event(time, device, name, fields))

    def write(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if self._all or event.event in self._seen:
            self._show_event(event)

    def _show_event(self, event: Event) -> None:
        for watch, names in self._watches:
            if names is None or event.event in names:
                watch(event)
