"""Event log of a run, kept on disk because a long run has ten million events.

A query is a pass over the log: over all events, over events of some names (`EventLog.of`) or of a time span
(`EventLog.within`), or over selected fields (`EventLog.rows`), which is fastest.

The log is stored in chunks of consecutive events. Events with the same name and the same fields have one form. A chunk
stores the events of each form in columns: one column for the places of these events in the chunk, and one each for
their times, their devices and each field.
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
"""Name of an event and the names of its fields."""
Columns = Sequence[Sequence[Any]]
"""Columns of one form in a chunk: the places of its events in the chunk, their times, devices, and fields."""
Row = tuple[Any, ...]
"""One event of a form: time, device, and the value of each field."""
_Packed = tuple[str, Any]
"""Encoding of a compressed column, and its content."""
Converter = Callable[[Form, Columns], Iterable[Item]]
"""A function that converts the events of one form to values, one for each event."""
CHUNK = 1024
"""Events per chunk on disk; the recent events, which do not fill a chunk yet, stay in memory."""
_STORED_AS_IS = {int, float, str, bool, type(None)}
"""Types of values that are stored as they are; all others are converted to plain values by JSON."""
_CACHED = 16
"""Number of decoded forms of chunks, or of converted chunks, kept in memory for repeated reads."""


class _Chunk(NamedTuple):
    """Consecutive events."""

    earliest: float
    """Lowest time of an event in seconds."""
    latest: float
    """Highest time of an event in seconds."""
    parts: dict[Form, tuple[int, Columns | tuple[int, int]]]
    """Form -> number of its events, and their columns; for a chunk on disk, offset and length of the columns."""


class _Store:
    """State shared by a log and all views of the log."""

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self._forms: list[Form] = []
        """The form of each recent event."""
        self._recent: list[Row] = []
        """The row of each recent event."""
        self._devices: set[str] = set()
        """Devices of the events in `chunks`, so that a query of all devices reads no chunk."""
        self._recent_as_chunk: tuple[int, _Chunk] | None = None
        """Number of recent events at the last call of `_recent_chunk`, and its result."""
        self._file: Any = None
        """Temporary file with the columns of the chunks; None before the first chunk."""
        self._size = 0
        """Bytes of the file."""
        self.decode = lru_cache(_CACHED)(self._decode_columns)
        self.on_chunk: Callable[[_Chunk], None] = lambda _: None
        """Callback for each full chunk, with its columns in memory, and finally for the recent events."""

    def add(self, form: Form, row: Row) -> None:
        self._forms.append(form)
        recent = self._recent
        recent.append(row)
        if len(recent) == CHUNK:
            chunk = self._recent_chunk()
            self._forms, self._recent, self._recent_as_chunk = [], [], None
            self._write_chunk(chunk)
            self.on_chunk(chunk)

    def _write_chunk(self, chunk: Any) -> None:
        """Write the columns of a chunk to the file."""
        parts: dict[Form, tuple[int, Columns | tuple[int, int]]] = {}
        for form, (count, columns) in chunk.parts.items():
            _, _, devices, *_ = columns
            self._devices.update(devices)
            parts[form] = (count, self._write_columns([*map(_pack_column, columns)]))
        self.chunks.append(chunk._replace(parts=parts))

    def finish(self) -> None:
        """Pass the recent events to the callback."""
        if self._recent:
            self.on_chunk(self._recent_chunk())

    def iterate_chunks(self) -> Iterator[_Chunk]:
        """Yield the chunks in order, with the recent events as the last chunk."""
        yield from self.chunks
        if self._recent:
            yield self._recent_chunk()

    def devices(self) -> set[str]:
        return self._devices.union(row[1] for row in self._recent)

    def _recent_chunk(self) -> _Chunk:
        """Return the recent events as a chunk."""
        if self._recent_as_chunk is None or self._recent_as_chunk[0] != len(
            self._recent
        ):
            groups: dict[Form, tuple[list[int], list[Row]]] = {}
            # Most events share few `Form` objects, and hashing a form would take longer than the rest of the loop.
            groups_by_identity: dict[int, tuple[list[int], list[Row]]] = {}
            events = zip(self._forms, self._recent, strict=True)
            for place, (form, row) in enumerate(events):
                group = groups_by_identity.get(id(form))
                if group is None:
                    group = groups.setdefault(form, ([], []))
                    groups_by_identity[id(form)] = group
                places, rows = group
                places.append(place)
                rows.append(row)
            parts: Any = {}
            for form, (places, rows) in groups.items():
                parts[form] = (len(rows), [places, *zip(*rows, strict=True)])
            times = [row[0] for row in self._recent]
            self._recent_as_chunk = len(times), _Chunk(min(times), max(times), parts)
        return self._recent_as_chunk[1]

    def rounded(self) -> _Store:
        """Return a store of the same events with times rounded as in a file."""
        store = _Store()
        for chunk in self.iterate_chunks():
            parts: dict[Form, tuple[int, Columns | tuple[int, int]]] = {}
            for form, (count, content) in chunk.parts.items():
                if isinstance(content, tuple):
                    packed = self._read_columns(*content)
                else:
                    packed = list(map(_pack_column, content))
                # Only the column of the times is decoded and packed again.
                places, times, *other_columns = packed
                rounded = [round(time, DIGITS) for time in _unpack_column(*times)]
                packed = [places, _pack_column(rounded), *other_columns]
                parts[form] = (count, store._write_columns(packed))
            earliest = round(chunk.earliest, DIGITS)
            latest = round(chunk.latest, DIGITS)
            store.chunks.append(_Chunk(earliest, latest, parts))
        store._devices = self.devices()
        return store

    def _write_columns(self, packed: list[_Packed]) -> tuple[int, int]:
        """Append packed columns to the file; return their offset and length in bytes."""
        content = marshal.dumps(packed)
        # A run with fewer events than a chunk opens no file.
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - deleted together with this store
        offset = self._size
        os.pwrite(self._file.fileno(), content, offset)
        self._size += len(content)
        return offset, len(content)

    def _read_columns(self, offset: int, length: int) -> list[_Packed]:
        content = os.pread(self._file.fileno(), length, offset)
        # The content is safe for marshal, because `_write_columns` has written it.
        return marshal.loads(content)  # type: ignore[no-any-return]

    def _decode_columns(self, offset: int, length: int) -> Columns:
        return [_unpack_column(*each) for each in self._read_columns(offset, length)]


def _pack_column(column: Sequence[Any]) -> _Packed:
    """Compress a column quickly, because a stronger compression would dominate the time of a simulation.

    The encoding is ``same`` for equal values, a type code of `array` for numbers, and ``list`` for all others.
    """
    types = set(map(type, column))
    # Tuples and numpy's floats become plain values, as in a line of the events' file.
    if not types <= _STORED_AS_IS:
        return "list", json.loads(json.dumps(column))
    # Both ends are compared first, since a count passes over the whole column.
    if (
        len(types) == 1
        and column[0] == column[-1]
        and column.count(column[0]) == len(column)
    ):
        return "same", (column[0], len(column))
    if types == {float}:
        return "d", array("d", column)
    # An unsigned integer of four bytes takes half the space of a float.
    if types == {int} and min(column) >= 0 and max(column) < 1 << 32:
        return "I", array("I", column)
    return "list", list(column)


def _unpack_column(encoding: str, content: Any) -> Sequence[Any]:
    if encoding == "list":
        return content  # type: ignore[no-any-return]
    if encoding == "same":
        value, count = content
        return [value] * count
    return array(encoding, content)


class EventLog(Sequence[Event]):
    """Events in the order of their appending, or a view of another log (see `of` and `within`)."""

    add: Callable[[Form, Row], None]
    """Add an event as form and row, without the cost of an `Event` object."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._store = _Store()
        self.add = self._store.add
        self._names: frozenset[str] | None = None
        self._after, self._until = -math.inf, math.inf
        for event in events:
            self.append(event)

    def append(self, event: Event) -> None:
        """Add an event."""
        time, device, name, fields = event
        self.add((name, tuple(fields)), (time, device, *fields.values()))

    def follow(self, write: Callable[[str], None]) -> None:
        """Pass the lines of all future events to ``write``, `CHUNK` events at a time, and the remainder at `close`.

        Exceptions of ``write`` are raised by the call that adds an event.
        """

        def write_chunk(chunk: _Chunk) -> None:
            write("".join(self._convert_chunk(chunk, _make_lines)))

        self._store.on_chunk = write_chunk

    def close(self) -> None:
        """Pass the lines of the recent events to the function of `follow`; no more events may be added."""
        self._store.finish()

    def rounded(self) -> EventLog:
        """Return a log of the same events with times rounded as in a file."""
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
        """Return a view of the events later than ``after`` and not later than ``until``, in seconds."""
        return self._make_view(
            self._names, max(after, self._after), min(until, self._until)
        )

    def _make_view(
        self, names: frozenset[str] | None, after: float, until: float
    ) -> EventLog:
        # __init__ would create another store.
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
        """The latest time of all events in the underlying log, also for a view; 0 without events."""
        return max(
            (chunk.latest for chunk in self._store.iterate_chunks()), default=0.0
        )

    def rows(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the given fields of each event (None if missing), including ``time``, ``device`` and ``event``."""
        return self._iterate_items(_row_items(fields))

    def columns(self, *fields: str) -> Iterator[tuple[str, Sequence[Iterable[Any]]]]:
        """Yield the name and the given fields, as columns, of the events of each form in each chunk.

        The column of a field that the form lacks repeats None endlessly.
        """
        for chunk in self._store.iterate_chunks():
            if self._is_outside(chunk):
                continue
            for (name, keys), (_, content) in chunk.parts.items():
                if self._names is not None and name not in self._names:
                    continue
                _, *columns = self._unpack_columns(content)
                if not self._is_inside(chunk):
                    times = columns[0]
                    is_within = [self._after < time <= self._until for time in times]
                    columns = [list(compress(column, is_within)) for column in columns]
                by_field = dict(zip(("time", "device", *keys), columns, strict=True))
                yield name, [by_field.get(field, repeat(None)) for field in fields]

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

    def _iterate_items(self, convert: Converter[Item]) -> Iterator[Item]:
        for chunk in self._store.iterate_chunks():
            yield from self._convert_chunk(chunk, convert)

    def _convert_chunk(self, chunk: _Chunk, convert: Converter[Item]) -> Iterable[Item]:
        """Return the view's events in a chunk, converted and in order."""
        if self._is_outside(chunk):
            return ()
        groups: list[Iterable[tuple[int, float, Item]]] = []
        for form, (_, content) in chunk.parts.items():
            name, _ = form
            if self._names is None or name in self._names:
                columns = self._unpack_columns(content)
                places, times, *_ = columns
                groups.append(zip(places, times, convert(form, columns), strict=False))
        # Events of one form are already in order.
        ordered = groups[0] if len(groups) == 1 else _merge_by_place(groups)
        if self._is_inside(chunk):
            return (item for _, _, item in ordered)
        return (item for _, time, item in ordered if self._after < time <= self._until)

    def __len__(self) -> int:
        return sum(map(self._count_events, self._store.iterate_chunks()))

    def __bool__(self) -> bool:
        return any(map(self._count_events, self._store.iterate_chunks()))

    def _count_events(self, chunk: _Chunk) -> int:
        if self._is_outside(chunk):
            return 0
        if self._is_inside(chunk):
            total = 0
            for (name, _), (count, _) in chunk.parts.items():
                if self._names is None or name in self._names:
                    total += count
            return total
        # Any column has one value for each event.
        return sum(1 for _ in self._convert_chunk(chunk, lambda _, columns: columns[0]))

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        """Return one event or a slice. Each access searches the log, so iteration is better for many events."""
        if isinstance(index, slice):
            return list(self)[index]
        # A range checks the index and resolves negative ones.
        remaining = range(len(self))[index]
        for chunk in self._store.iterate_chunks():
            count = self._count_events(chunk)
            if remaining < count:
                return list(self._convert_chunk(chunk, _make_events))[remaining]
            remaining -= count
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
        """Yield `rows` of the fields, sorted by a function of a row; fast for an almost sorted log."""
        keys = np.fromiter((key(row) for row in self.rows(*fields)), float)
        return self._pick_items(np.argsort(keys, kind="stable"), _row_items(fields))

    def _pick_items(
        self, indices: npt.NDArray[np.int64], convert: Converter[Item]
    ) -> Iterator[Item]:
        """Yield the converted events at some indices of the log, in the order of the indices."""
        chunks = list(self._store.iterate_chunks())
        ends = np.cumsum([self._count_events(chunk) for chunk in chunks])
        chunk_numbers = np.searchsorted(ends, indices, side="right")

        # In an almost sorted log, neighbours come from the same few chunks.
        @lru_cache(_CACHED)
        def convert_chunk(number: int) -> list[Item]:
            return list(self._convert_chunk(chunks[number], convert))

        for number, index in zip(chunk_numbers, indices, strict=True):
            # The difference is a negative index, which counts back from the end of the chunk.
            yield convert_chunk(number)[index - ends[number]]


def _merge_by_place(
    groups: Iterable[Iterable[tuple[int, float, Item]]],
) -> list[tuple[int, float, Item]]:
    return sorted(chain.from_iterable(groups), key=itemgetter(0))


def _row_items(fields: Sequence[str]) -> Converter[tuple[Any, ...]]:
    """Return a converter of events to tuples of the given fields."""

    def rows(form: Form, columns: Columns) -> Iterator[tuple[Any, ...]]:
        name, keys = form
        _, *value_columns = columns
        by_field: dict[str, Iterable[Any]] = dict(
            zip(("time", "device", *keys), value_columns, strict=True)
        )
        by_field["event"] = repeat(name)
        selected = [by_field.get(field, repeat(None)) for field in fields]
        return zip(*selected, strict=False)

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
    """Return events as the lines of a file; encoding by columns is several times faster than event by event."""
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
    types = set(map(type, column))
    if types == {int} or (types == {float} and all(map(math.isfinite, column))):
        return map(repr, column)
    if types == {str}:
        # Texts repeat, since they are names of devices, spans or messages.
        encoded = {value: LINES.encode(value) for value in set(column)}
        return map(encoded.__getitem__, column)
    return map(LINES.encode, column)
