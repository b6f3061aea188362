"""Recording of simulation events to the log and to observers.

An event is recorded as an `Event`, or faster as a form and a row: the form has the event's name and the names of its
fields, and the row has the time, the device and the values of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from testbed.trace.events import Event
from testbed.trace.log import EventLog, Form, Row

Observer = Callable[[Event], None]


class Recorder:
    """Recorder of events; calls ``on_event`` with each event after logging, or only with events of some ``names``."""

    def __init__(
        self, on_event: Observer | None = None, names: Collection[str] | None = None
    ) -> None:
        self.events = EventLog()
        self._append = self.events.add
        self._permanent = [] if on_event is None else [(on_event, names)]
        """The observer of the whole run with its event names; None stands for all names."""
        self._observers = list(self._permanent)
        self._observed_names = frozenset[str]()
        """Names of observed events; no `Event` is created for a row of another name."""
        self._observes_all = False
        """Whether an observer gets all events."""
        self.observe(None)

    def observe(self, observer: Observer | None, names: Collection[str] = ()) -> None:
        """Call ``observer`` with each event of ``names`` after logging, instead of the observer of an earlier call.

        The observer may inject faults at once. None removes the observer.
        """
        self._observers = list(self._permanent)
        if observer is not None:
            self._observers.append((observer, names))
        observed_names: set[str] = set()
        self._observes_all = False
        for _, own_names in self._observers:
            if own_names is None:
                self._observes_all = True
            else:
                observed_names.update(own_names)
        self._observed_names = frozenset(observed_names)

    def add(self, form: Form, row: Row) -> None:
        """Record an event, given as a form and a row of values."""
        self._append(form, row)
        if self._observes_all or form[0] in self._observed_names:
            time, device, *values = row
            name, keys = form
            fields = dict(zip(keys, values, strict=True))
            self._show_event(Event(time, device, name, fields))

    def write(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if self._observes_all or event.event in self._observed_names:
            self._show_event(event)

    def _show_event(self, event: Event) -> None:
        for observer, names in self._observers:
            if names is None or event.event in names:
                observer(event)
