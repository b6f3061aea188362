"""Reliable, ordered delivery to one peer: a thread, a connection, and patience kept by whoever waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from agent.connection import Connection, ConnectionLost
from agent.settings import Address

BACKOFF_SECONDS = 0.01
BACKOFF_SECONDS_MOST = 0.25


class Rejected(Exception):  # noqa: N818 - what the peer did
    """The peer will not take this message however often it is sent."""


@dataclass(eq=False)
class Parcel:
    """One message on its way."""

    body: bytes
    done: Callable[[BaseException | None], None]
    """Called once from the sender's thread, unless the parcel was withdrawn."""
    begun: float = 0.0
    """Monotonic instant of the first attempt."""
    arrived: int = 0
    """Most bytes that any attempt got acknowledged."""
    ended: float = 0.0
    """Monotonic instant of the acknowledgement."""
    withdrawn: bool = False
    attempts: int = 0


class Lane:
    """Delivers parcels to one peer in the order they were put."""

    def __init__(self, peer: str, address: Address, token: str) -> None:
        self.peer = peer
        self.progress = time.monotonic()
        """Monotonic instant of the last sign that the peer takes in what it is sent."""
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._connection = Connection(address, "/messages", token)
        self._lock = threading.Lock()
        self._current: Parcel | None = None
        self._wake = threading.Event()
        self._closed = False
        self.waiting = 0
        self._thread = threading.Thread(target=self._run, name=f"send-{peer}", daemon=True)
        self._thread.start()

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel behind those before it."""
        self.waiting += 1
        self._parcels.put(parcel)

    def withdraw(self, parcel: Parcel) -> None:
        """Do not deliver it any more, even if it is under way."""
        with self._lock:
            parcel.withdrawn = True
            if self._current is parcel:
                self._connection.interrupt()
                self._wake.set()

    def close(self) -> None:
        """Give up everything and end the thread."""
        with self._lock:
            self._closed = True
            self._connection.interrupt()
            self._wake.set()
        self._parcels.put(None)

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None and not self._closed:
            with self._lock:
                self._current = parcel
                self._wake.clear()
            failure: BaseException | None = None
            try:
                delivered = self._deliver(parcel)
            except Exception as error:  # noqa: BLE001 - whoever sends is told, and the lane lives on
                delivered, failure = True, error
            with self._lock:
                self._current = None
            parcel.ended = time.monotonic()
            self.waiting -= 1
            if delivered and not parcel.withdrawn:
                parcel.done(failure)
        self._connection.close()

    def _deliver(self, parcel: Parcel) -> bool:
        """Try until the peer has it; return False when it was withdrawn."""
        backoff = BACKOFF_SECONDS
        parcel.begun = time.monotonic()
        while not parcel.withdrawn and not self._closed:
            parcel.attempts += 1
            try:
                status, text = self._attempt(parcel)
            except ConnectionLost as lost:
                if lost.stale:
                    continue
            else:
                if status < 300:
                    self.progress = time.monotonic()
                    return True
                if status != 503:
                    raise Rejected(f"{self.peer} refused a message: {_reason(status, text)}")
            self._wake.wait(backoff)
            backoff = min(2 * backoff, BACKOFF_SECONDS_MOST)
        return False

    def _attempt(self, parcel: Parcel) -> tuple[int, bytes]:
        self._connection.connect()
        with self._lock:
            if parcel.withdrawn or self._closed:
                raise ConnectionLost("withdrawn")

        def acknowledged(count: int) -> None:
            if count > parcel.arrived:
                parcel.arrived = count
                self.progress = time.monotonic()

        return self._connection.post(parcel.body, acknowledged)


def _reason(status: int, text: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not our JSON: the status says it all
        return f"{json.loads(text)['error']} ({status})"
    return str(status)


async def deliver(lane: Lane, body: bytes, patience: float | None) -> Parcel:
    """Send through a lane and wait for the acknowledgement.

    Raises:
        TimeoutError: when, with ``patience``, the peer took in nothing for so many seconds; the parcel is withdrawn.
        Rejected: when the peer refuses the message for good.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(failure: BaseException | None) -> None:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    def done(failure: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the program has ended and its loop with it
            loop.call_soon_threadsafe(settle, failure)

    parcel = Parcel(body, done)
    called = time.monotonic()
    lane.put(parcel)
    try:
        while not future.done():
            if patience is None:
                await future
                break
            left = max(lane.progress, called) + patience - time.monotonic()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([future], timeout=left)
        future.result()
    except BaseException:
        lane.withdraw(parcel)
        raise
    return parcel
