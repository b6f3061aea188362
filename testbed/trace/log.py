"""Event log of a run, kept on disk: a long run has ten million events.

Queries are passes: over all events, over events of some names (`EventLog.of`) or of a time span (`EventLog.within`), or
over selected fields (`EventLog.rows`), which is fastest.
"""

from __future__ import annotations

import json
import marshal
import math
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, overload

from testbed.common.lazy import np, npt
from testbed.trace.events import DIGITS, LEADING, LINES, Event

Item = TypeVar("Item")
Form = tuple[str, tuple[str, ...]]
"""Name of an event with the names of its fields."""
Columns = Sequence[Sequence[Any]]
"""Events of one form: their places in a chunk, times, devices, and the values of each field."""
Row = tuple[Any, ...]
"""One event of a form: time, device, and the value of each field."""
_Packed = tuple[str, Any]
"""A compressed column and its encoding."""
Items = Callable[[Form, Columns], Iterable[Item]]
"""A function that converts events of one form to values."""
CHUNK = 1024
"""Events per chunk on disk; the latest events, fewer than one chunk, stay in memory."""
_PLAIN = {int, float, str, bool, type(None)}
"""Types that are stored as they are; all others go through JSON."""
_DECODED = 16
"""Number of decoded chunk columns kept in memory for repeated reads."""


class _Chunk(NamedTuple):
    """Consecutive events on disk: time range, counts by form, and offsets."""

    earliest: float
    latest: float
    parts: dict[Form, tuple[int, Columns | tuple[int, int]]]
    """Number of events, and their columns or where in the file these are: place and length."""


class _Store:
    """State shared by a log and its views."""

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self._forms: list[Form] = []
        self._recent: list[Row] = []
        """The forms and the rows of the events since the last chunk."""
        self._devices: set[str] = set()
        """Devices of the events in chunks, so that a query of all devices reads no chunk."""
        self._last: tuple[int, _Chunk] | None = None
        """The recent events as a chunk, and their number when the chunk was made."""
        self._file: Any = None
        """Temporary file with the columns of the chunks; None before the first chunk."""
        self._size = 0
        """Bytes of the file."""
        self.decode = lru_cache(_DECODED)(self._decode_columns)
        self.complete: Callable[[_Chunk], None] = lambda _: None
        """Callback for each chunk before its write, and finally for the recent events."""

    def add(self, form: Form, row: Row) -> None:
        self._forms.append(form)
        recent = self._recent
        recent.append(row)
        if len(recent) == CHUNK:
            chunk = self._recent_chunk()
            self._forms, self._recent, self._last = [], [], None
            self.keep(chunk)
            self.complete(chunk)

    def keep(self, chunk: Any) -> None:
        """Write the columns of a chunk."""
        # Column 0 has the places, 1 the times, 2 the devices.
        self._devices.update(*(columns[2] for _, columns in chunk.parts.values()))
        parts = {
            form: (count, self._write_columns([*map(_pack_column, columns)]))
            for form, (count, columns) in chunk.parts.items()
        }
        self.chunks.append(chunk._replace(parts=parts))

    def finish(self) -> None:
        """Pass on the recent events."""
        if self._recent:
            self.complete(self._recent_chunk())

    def all(self) -> Iterator[_Chunk]:
        """Yield the chunks in order, the recent events as the last."""
        yield from self.chunks
        if self._recent:
            yield self._recent_chunk()

    def devices(self) -> set[str]:
        return self._devices.union(row[1] for row in self._recent)

    def _recent_chunk(self) -> _Chunk:
        """Return the recent events as a chunk."""
        if self._last is None or self._last[0] != len(self._recent):
            grouped: dict[Form, tuple[list[int], list[Row]]] = {}
            # By identity: hashing a form would take longer than everything else here.
            known: dict[int, tuple[list[int], list[Row]]] = {}
            events = zip(self._forms, self._recent, strict=True)
            for place, (form, row) in enumerate(events):
                group = known.get(id(form))
                if group is None:
                    group = grouped.setdefault(form, ([], []))
                    known[id(form)] = group
                group[0].append(place)
                group[1].append(row)
            parts: Any = {}
            for form, (places, rows) in grouped.items():
                parts[form] = (len(rows), [places, *zip(*rows, strict=True)])
            times = [row[0] for row in self._recent]
            self._last = len(times), _Chunk(min(times), max(times), parts)
        return self._last[1]

    def rounded(self) -> _Store:
        """Return the same events with times as in a file."""
        store = _Store()
        for chunk in self.all():
            parts: dict[Form, tuple[int, Columns | tuple[int, int]]] = {}
            for form, (count, content) in chunk.parts.items():
                if isinstance(content, tuple):
                    packed = self._read_columns(*content)
                else:
                    packed = list(map(_pack_column, content))
                # All columns except the times stay packed as they are.
                places, times, *others = packed
                rounded = [round(time, DIGITS) for time in _unpack_column(*times)]
                columns = [places, _pack_column(rounded), *others]
                parts[form] = (count, store._write_columns(columns))
            earliest = round(chunk.earliest, DIGITS)
            latest = round(chunk.latest, DIGITS)
            store.chunks.append(_Chunk(earliest, latest, parts))
        store._devices = self.devices()
        return store

    def _write_columns(self, packed: list[_Packed]) -> tuple[int, int]:
        content = marshal.dumps(packed)
        # A run with fewer events than a chunk opens no file.
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - is gone with this store
        place, self._size = self._size, self._size + len(content)
        os.pwrite(self._file.fileno(), content, place)
        return place, len(content)

    def _read_columns(self, offset: int, length: int) -> list[_Packed]:
        return marshal.loads(os.pread(self._file.fileno(), length, offset))  # type: ignore[no-any-return]  # our own

    def _decode_columns(self, offset: int, length: int) -> Columns:
        return [_unpack_column(*each) for each in self._read_columns(offset, length)]


def _pack_column(column: Sequence[Any]) -> _Packed:
    """Compress a column quickly; stronger compression would dominate the run time."""
    kinds = set(map(type, column))
    # Lists and numpy's numbers become plain values, as in a line of the events' file.
    if not kinds <= _PLAIN:
        return "list", json.loads(json.dumps(column))
    # The ends are compared first, since a count passes over the whole column.
    if (
        len(kinds) == 1
        and column[0] == column[-1]
        and column.count(column[0]) == len(column)
    ):
        return "same", (column[0], len(column))
    if kinds == {float}:
        return "d", array("d", column)
    # Type I has four bytes without a sign, half of what a float takes.
    if kinds == {int} and min(column) >= 0 and max(column) < 1 << 32:
        return "I", array("I", column)
    return "list", list(column)


def _unpack_column(encoding: str, content: Any) -> Sequence[Any]:
    if encoding == "list":
        return content  # type: ignore[no-any-return]
    return [content[0]] * content[1] if encoding == "same" else array(encoding, content)


class EventLog(Sequence[Event]):
    """Events in the order of their appending, or a view of another log (see `of` and `within`)."""

    add: Callable[[Form, Row], None]
    """Add an event by its form, faster than `append`: no `Event` object is created until requested."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._store = _Store()
        self.add = self._store.add
        self._names: frozenset[str] | None = None
        self._after, self._until = -math.inf, math.inf
        for event in events:
            self.append(event)

    def append(self, event: Event) -> None:
        """Add an event; the latest ones stay in memory, the others are in a temporary file."""
        time, device, name, fields = event
        self.add((name, tuple(fields)), (time, device, *fields.values()))

    def follow(self, write: Callable[[str], None]) -> None:
        """Pass the lines of all events to ``write``, `CHUNK` events at a time; the last ones follow at `close`.

        Exceptions of ``write`` are raised by the call that adds an event.
        """

        def write_chunk(chunk: _Chunk) -> None:
            write("".join(self._of_chunk(chunk, _make_lines)))

        self._store.complete = write_chunk

    def close(self) -> None:
        """Pass the latest lines to followers; no more events may follow."""
        self._store.finish()

    def rounded(self) -> EventLog:
        """Return the whole log with times as in a file."""
        log = EventLog()
        log._store = self._store.rounded()
        log.add = log._store.add
        return log

    def lines(self) -> Iterator[str]:
        """Yield the line of each event, including the line end."""
        return self._iterate_items(_make_lines)

    @staticmethod
    def made_of(events: Iterable[Event]) -> EventLog:
        """Return events as a log; logs are returned unchanged."""
        return events if isinstance(events, EventLog) else EventLog(events)

    def of(self, *names: str) -> EventLog:
        """Return a view of the events of some names."""
        return self._make_view(frozenset(names), self._after, self._until)

    def within(self, after: float, until: float) -> EventLog:
        """Return a view of the events in a time span in seconds."""
        return self._make_view(
            self._names, max(after, self._after), min(until, self._until)
        )

    def _make_view(
        self, names: frozenset[str] | None, after: float, until: float
    ) -> EventLog:
        # Without __init__, which would make a store.
        view = EventLog.__new__(EventLog)
        view._store = self._store
        view._names = names
        view._after = after
        view._until = until
        return view

    @property
    def devices(self) -> set[str]:
        """The devices of all events in the underlying log, also for a view."""
        return self._store.devices()

    @property
    def latest(self) -> float:
        """The latest time of all events of the log; 0 without any."""
        return max((chunk.latest for chunk in self._store.all()), default=0.0)

    def rows(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the given fields of each event (None if missing), including ``time``, ``device`` and ``event``."""
        return self._iterate_items(_row_items(fields))

    def columns(self, *fields: str) -> Iterator[tuple[str, Sequence[Iterable[Any]]]]:
        """Yield, for each group of similar events, the name and the given fields as columns.

        A field that they lack repeats None without end.
        """
        for chunk in self._store.all():
            if self._is_outside(chunk):
                continue
            for (name, keys), (_, content) in chunk.parts.items():
                if self._names is not None and name not in self._names:
                    continue
                _, *columns = self._unpack_columns(content)
                if not self._is_inside(chunk):
                    times = columns[0]
                    chosen = [self._after < time <= self._until for time in times]
                    columns = [list(compress(column, chosen)) for column in columns]
                named = dict(zip(("time", "device", *keys), columns, strict=True))
                yield name, [named.get(field, repeat(None)) for field in fields]

    def _is_outside(self, chunk: _Chunk) -> bool:
        """Return whether a chunk has no event in the log's time span."""
        return chunk.latest <= self._after or chunk.earliest > self._until

    def _is_inside(self, chunk: _Chunk) -> bool:
        """Return whether all events of a chunk are in the log's time span."""
        return self._after < chunk.earliest and chunk.latest <= self._until

    def _unpack_columns(self, content: Columns | tuple[int, int]) -> Columns:
        return content if isinstance(content, list) else self._store.decode(*content)

    def __iter__(self) -> Iterator[Event]:
        return self._iterate_items(_make_events)

    def _iterate_items(self, items: Items[Item]) -> Iterator[Item]:
        for chunk in self._store.all():
            yield from self._of_chunk(chunk, items)

    def _of_chunk(self, chunk: _Chunk, items: Items[Item]) -> Iterable[Item]:
        if self._is_outside(chunk):
            return ()
        groups: list[Iterable[tuple[int, float, Item]]] = []
        for form, (_, content) in chunk.parts.items():
            if self._names is None or form[0] in self._names:
                columns = self._unpack_columns(content)
                places, times = columns[0], columns[1]
                groups.append(zip(places, times, items(form, columns), strict=False))
        # Events of one form are in order already.
        ordered = groups[0] if len(groups) == 1 else _merge_by_place(groups)
        if self._is_inside(chunk):
            return (item for _, _, item in ordered)
        return (item for _, time, item in ordered if self._after < time <= self._until)

    def __len__(self) -> int:
        return sum(map(self._count_events, self._store.all()))

    def __bool__(self) -> bool:
        return any(map(self._count_events, self._store.all()))

    def _count_events(self, chunk: _Chunk) -> int:
        if self._is_outside(chunk):
            return 0
        if self._is_inside(chunk):
            total = 0
            for (name, _), (count, _) in chunk.parts.items():
                if self._names is None or name in self._names:
                    total += count
            return total
        return sum(1 for _ in self._of_chunk(chunk, lambda _, columns: columns[1]))

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        """Return one event or a slice. Each access searches the log, so iteration is better for many events."""
        if isinstance(index, slice):
            return list(self)[index]
        # A range checks the index and resolves negative ones.
        number = range(len(self))[index]
        for chunk in self._store.all():
            count = self._count_events(chunk)
            if number < count:
                return list(self._of_chunk(chunk, _make_events))[number]
            number -= count
        raise IndexError(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EventLog | list):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def ordered(self) -> EventLog:
        """Return the whole log in the order of time; the log itself if already ordered."""
        times = np.fromiter((time for (time,) in self.rows("time")), float)
        # A simulation writes its events in order already.
        if bool((times[1:] >= times[:-1]).all()):
            return self
        order = np.argsort(times, kind="stable")
        return EventLog(self._pick_items(order, _make_events))

    def sorted_by(
        self, key: Callable[[tuple[Any, ...]], float], *fields: str
    ) -> Iterator[tuple[Any, ...]]:
        """Yield `rows` sorted by a key; fast for an almost sorted log."""
        keys = np.fromiter((key(row) for row in self.rows(*fields)), float)
        return self._pick_items(np.argsort(keys, kind="stable"), _row_items(fields))

    def _pick_items(
        self,
        places: npt.NDArray[np.int64],
        items: Callable[[Form, Columns], Iterable[Item]],
    ) -> Iterator[Item]:
        """Yield the converted events at some positions of the log."""
        chunks = list(self._store.all())
        ends = np.cumsum([self._count_events(chunk) for chunk in chunks])
        chosen = np.searchsorted(ends, places, side="right")

        # In an almost sorted log, neighbours come from the same few chunks.
        @lru_cache(_DECODED)
        def convert_chunk(number: int) -> list[Item]:
            return list(self._of_chunk(chunks[number], items))

        for number, place in zip(chosen, places, strict=True):
            # A negative index: `ends` counts the events up to the end of the chunk.
            yield convert_chunk(number)[place - ends[number]]


def _merge_by_place(
    groups: Iterable[Iterable[tuple[int, float, Item]]],
) -> list[tuple[int, float, Item]]:
    return sorted(chain.from_iterable(groups), key=itemgetter(0))


def _row_items(
    fields: Sequence[str],
) -> Callable[[Form, Columns], Iterator[tuple[Any, ...]]]:
    def rows(form: Form, columns: Columns) -> Iterator[tuple[Any, ...]]:
        name, keys = form
        named: dict[str, Iterable[Any]] = dict(
            zip(("time", "device", *keys), columns[1:], strict=True)
        )
        named["event"] = repeat(name)
        return zip(*(named.get(field, repeat(None)) for field in fields), strict=False)

    return rows


def _make_events(form: Form, columns: Columns) -> Iterator[Event]:
    name, keys = form
    _, times, devices, *values = columns
    rows = zip(*values, strict=True) if values else repeat(())
    return (
        Event(time, device, name, dict(zip(keys, row, strict=True)))
        for time, device, row in zip(times, devices, rows, strict=False)
    )


def _make_lines(form: Form, columns: Columns) -> Iterator[str]:
    """Return events as the lines of a file, encoded by columns: one by one would take several times as long."""
    name, keys = form
    _, times, devices, *values = columns
    texts = [
        _json_texts([round(time, DIGITS) for time in times]),
        _json_texts(devices),
        repeat(LINES.encode(name)),
    ]
    # A field's name is the method's choice and may contain a per cent sign.
    names = [LINES.encode(key).replace("%", "%%") for key in (*LEADING, *keys)]
    template = ", ".join(f"{name}: %s" for name in names)
    rows = zip(*texts, *map(_json_texts, values), strict=False)
    return map(f"{{{template}}}\n".__mod__, rows)


def _json_texts(column: Sequence[Any]) -> Iterable[str]:
    """Return each value of a column as JSON."""
    kinds = set(map(type, column))
    if kinds == {int} or (kinds == {float} and all(map(math.isfinite, column))):
        return map(repr, column)
    if kinds == {str}:
        known = {value: LINES.encode(value) for value in set(column)}
        return map(known.__getitem__, column)
    return map(LINES.encode, column)
