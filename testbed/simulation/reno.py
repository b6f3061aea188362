"""TCP Reno as in Linux, simulated per round trip: transfer time of a message over a lossy link.

A round sends as many packets as the window holds. Without a loss the window grows: by as many packets as were sent
until it reaches a threshold, by one afterwards. A loss halves it once for each recovery, and the lost packets are
repeated in the next round. A loss that no later packet shows waits for a timer: a probe after two round trips, or the
retransmission time-out. The constants are those of Linux 6, `net/ipv4/tcp_recovery.c` and `tcp_output.c`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

RETRANSMISSION_TIMEOUT = 0.2
"""Seconds beyond the round trip before TCP sends unanswered bytes again (Linux's minimum)."""
_LONGEST_TIMEOUT = 2.0
"""Maximum seconds of a time-out beyond the round trip: the agent reconnects after this silence."""
FIRST_WINDOW = 10
"""Initial window in packets."""
_MIN_WINDOW = 2
"""Minimum congestion window in packets after a loss (RFC 5681)."""
_DELAYED_ACKNOWLEDGEMENT = 0.04
"""A receiver acknowledges every second packet at once, and a single one after this number of seconds."""
_TICK = 0.005
"""Delay of short timers in seconds: the kernel adds 2 ms and rounds up to its tick of 4 ms."""
_DUPLICATE_THRESHOLD = 3
"""Number of packets after a lost one whose arrival reveals the loss at once; with fewer, a timer decides."""
_REORDERING_SHARE = 1 / 4
"""Share of a round trip for which RACK waits, since a missing packet may only be late (RFC 8985, 6.2)."""
_QUEUED_PACKETS = 2
"""TCP small queues: beyond the packets on the way, at most this number of packets waits before the link, ..."""
_QUEUED_SECONDS = 0.001
"""... plus the packets that the link sends in this number of seconds."""
_CERTAIN_ANSWERS = 4
"""Number of acknowledgements of which one arrives for certain: a loss of all is too rare to matter, and draws take
time."""
_ATTEMPTS = 10_000
"""Maximum number of rounds and time-outs beyond one per packet, after which the message gets through."""

Chance = Callable[[], bool]


def double_timeout(seconds: float, round_trip: float) -> float:
    """Return the retransmission time-out after one of so many seconds without an answer (RFC 6298, 5.5)."""
    return min(2 * seconds, round_trip + _LONGEST_TIMEOUT)


class Window:
    """Congestion window in packets, kept from one message to the next."""

    __slots__ = ("size", "threshold")

    def __init__(self) -> None:
        self.size: int = FIRST_WINDOW
        self.threshold: float = math.inf
        """The size from which a round adds one packet only."""

    def grow(self, sent: int) -> None:
        """Grow after a round without loss that used the window.

        Below the threshold a round uses the window with more than half of it, above only with all of it
        (Linux, `tcp_is_cwnd_limited`).
        """
        if self.size >= self.threshold or self.size < 2 * sent:
            self.raise_by(sent)

    def raise_by(self, acknowledged: int) -> None:
        """Grow by the acknowledged packets of a round: slow start up to the threshold, then one packet for a window."""
        if self.size < self.threshold:
            self.size = int(min(self.size + acknowledged, self.threshold))
        elif acknowledged >= self.size:
            self.size += 1

    def halve(self) -> None:
        """Shrink after a loss revealed by later packets."""
        self.size = max(self.size // 2, _MIN_WINDOW)
        self.threshold = float(self.size)

    def restart(self) -> None:
        """Shrink to the minimum after a time-out; the window then grows fast up to the threshold."""
        # Linux begins with one packet (`tcp_enter_loss`), whose acknowledgement makes two.
        self.size = _MIN_WINDOW


class Transmission:
    """The packets of one message. `run` fills in ``sent``, ``busy``, ``over`` and ``last``."""

    __slots__ = (
        "_attempt_limit",
        "_attempts",
        "_budget",
        "_largest_round",
        "_lost",
        "_missing",
        "_new_before_halving",
        "_now",
        "_recovering",
        "_round_trip",
        "_spacing",
        "_timed_out",
        "_unheard",
        "_unnoticed",
        "_unsent",
        "_window",
        "busy",
        "last",
        "over",
        "sent",
    )

    def __init__(
        self,
        window: Window,
        packets: int,
        spacing: float,
        round_trip: float,
        lost: Chance,
        unheard: Chance,
    ) -> None:
        """Begin with all packets unsent.

        ``spacing`` is the time of a packet on the link and ``round_trip`` the sum of both delays, in seconds. ``lost``
        and ``unheard`` draw the fates of the next packet and of the next acknowledgement: true if lost.
        """
        self.sent = 0
        """Packets sent in all."""
        self.busy = 0.0
        """Seconds until every packet had left for the first time."""
        self.over = 0.0
        """Seconds until the packet that arrives last had left."""
        self.last = 0
        """Packets of the last round."""
        self._window = window
        self._unsent = packets
        """Number of unsent packets."""
        self._missing = 0
        """Packets known to be lost."""
        self._unnoticed = 0
        """Lost packets at the end of the last round: the sender learns of them only from packets of the next round."""
        self._spacing = spacing
        self._round_trip = round_trip
        self._lost = lost
        self._unheard = unheard
        self._now = 0.0
        """Seconds since the first packet began to leave."""
        self._recovering = False
        """Whether the round repeats lost packets, so that Linux is in the state Recovery or Loss."""
        self._timed_out = False
        """Whether the current recovery has had a time-out, which is Linux's state Loss."""
        self._budget = 0
        """Number of packets per round during recovery."""
        self._new_before_halving = 0
        """Number of new packets in the next round that leave before the sender learns of the loss; their loss does not
        halve the window again."""
        self._attempts = 0
        """Number of rounds and repetitions so far."""
        self._attempt_limit = packets + _ATTEMPTS
        self._largest_round = packets
        """Number of packets that leave in one round at most; further ones wait in the socket."""
        if spacing:
            on_the_way = round_trip / spacing
            self._largest_round = int(
                on_the_way + _QUEUED_PACKETS + _QUEUED_SECONDS / spacing
            )

    def run(self) -> None:
        """Send until everything has arrived."""
        while self._unsent or self._missing:
            self._send_round()
        self.over = max(self._now - self._round_trip, self.busy)

    def _send_round(self) -> None:
        unnoticed = self._unnoticed
        self._unnoticed = 0
        window = self._budget
        if not self._recovering:
            # Unnoticed losses still count as packets on the way.
            window = min(self._window.size, self._largest_round) - unnoticed
        # Lost packets go first, as in Linux.
        repeated = min(self._missing, window)
        new = min(self._unsent, window - repeated)
        count = repeated + new
        self._missing -= repeated
        self._unsent -= new
        fates = [True] * unnoticed + self._draw_fates(count)
        lost = sum(fates)
        self.sent += count
        self.last = count
        # The instant at which the last packet of the round has left.
        gone = self._now + count * self._spacing
        more = self._unsent > 0 or self._missing > 0
        if new and not self._unsent:
            self.busy = gone
        if not lost and not more:
            self._now = gone + self._round_trip
            if self._timed_out:
                self._window.raise_by(count)
            elif not self._recovering:
                self._window.grow(count)
            return
        self._learn_fates(fates, repeated, gone)

    def _learn_fates(self, fates: list[bool], repeated: int, gone: float) -> None:
        """Process the fates of a round with losses, or of a round followed by others.

        Unnoticed losses of the round before come first in ``fates``.
        """
        count, lost = len(fates), sum(fates)
        arrived = count - lost
        first = fates.index(True) if lost else count
        # If only the last ones are lost, the receiver sees no gap and acknowledges every other packet.
        in_order = first == arrived
        answers = arrived // 2 if in_order and not self._recovering else arrived
        heard = self._is_heard(answers)
        if self._timed_out and heard:
            # After a time-out, slow start begins while packets are still missing (RFC 5681, 3.1): Linux withholds it
            # in the states CWR and Recovery alone (`tcp_cong_control`). Packets behind a gap do not raise the window
            # (`tcp_may_raise_cwnd`). New packets that Linux sends before repeated ones (F-RTO) are left out.
            self._window.raise_by(first)
        ends = not self._unsent and not self._missing
        self._missing += lost
        if not heard or (lost and in_order and ends):
            self._await_timer(gone, count, arrived, heard, in_order)
            return
        self._now = max(self._now + self._round_trip + self._spacing, gone)
        if lost and in_order and not self._recovering:
            # Nothing behind the lost packets has arrived, and the others let new packets leave.
            self._missing -= lost
            self._unnoticed = lost
            self._window.grow(arrived)
            self._prepare_round(self._window.size)
        elif lost and not self._recovering:
            self._begin_recovery(first, arrived - first)
        else:
            self._continue_sending(fates, repeated)

    def _is_heard(self, answers: int) -> bool:
        """Draw whether any of so many acknowledgements arrives."""
        return answers >= _CERTAIN_ANSWERS or not all(
            self._unheard() for _ in range(answers)
        )

    def _continue_sending(self, fates: list[bool], repeated: int) -> None:
        """Begin the next round of a recovery, or of sending without losses."""
        if not self._recovering:
            self._window.grow(len(fates))
        elif self._timed_out:
            # Any loss ends this slow start with a recovery, which halves the window: Linux leaves the state Loss when a
            # repeated packet is lost again (`FLAG_LOST_RETRANS` in `tcp_fastretrans_alert`), and when all repeated ones
            # have arrived and a new one has not.
            if any(fates):
                self._window.halve()
                self._timed_out = False
        # A repeated packet that is lost again belongs to the loss that halved the window.
        elif any(fates[repeated + self._new_before_halving :]):
            self._window.halve()
        self._prepare_round(self._window.size)

    def _begin_recovery(self, in_order: int, behind: int) -> None:
        """Halve the window: ``in_order`` packets arrived before the first lost one, and ``behind`` after it."""
        self._window.halve()
        budget = self._window.size
        if behind < _DUPLICATE_THRESHOLD:
            timer = self._round_trip * _REORDERING_SHARE + _TICK
            if self._unsent:
                # Acknowledgements of new packets reveal the loss before the timer.
                timer = min(timer, self._round_trip + self._spacing)
            self._now += timer
        if self._unsent:
            # Until the loss is detected, each acknowledgement lets one new packet leave; then every second one does.
            before = in_order + min(behind, _DUPLICATE_THRESHOLD - 1)
            budget = before + max(1, (behind - 1) // 2)
        self._prepare_round(budget)
        # After `_prepare_round`, which resets the number.
        self._new_before_halving = in_order + _DUPLICATE_THRESHOLD - 1

    def _draw_fates(self, count: int) -> list[bool]:
        """Return for each of some packets whether it is lost."""
        self._attempts += 1
        if self._attempts > self._attempt_limit:
            return [False] * count
        lost = self._lost
        return [lost() for _ in range(count)]

    def _draw_failure(self) -> bool:
        self._attempts += 1
        if self._attempts > self._attempt_limit:
            return False
        return self._lost() or self._unheard()

    def _prepare_round(self, budget: int) -> None:
        """Set the number of packets of the next round, which belongs to a recovery while lost packets are missing."""
        self._recovering = self._missing > 0
        self._timed_out = self._timed_out and self._recovering
        self._budget = budget
        self._new_before_halving = 0

    def _time_out(self, since: float) -> None:
        """Repeat one packet until acknowledged, after silence since ``since``."""
        # Linux halves the threshold once for a window (`tcp_enter_loss`): a recovery has done so, and a time-out that
        # repeats without an acknowledgement does not do so again.
        if not self._recovering or self._timed_out:
            self._window.halve()
        self._window.restart()
        self._timed_out = True
        wait = self._round_trip + RETRANSMISSION_TIMEOUT
        self._now = since + wait
        self.sent += 1
        while self._draw_failure():
            wait = double_timeout(wait, self._round_trip)
            self._now += wait
            self.sent += 1
        self._now += self._round_trip
        self._missing = max(0, self._missing - 1)

    def _await_timer(
        self, gone: float, count: int, arrived: int, heard: bool, in_order: bool
    ) -> None:
        """Wait for the timer that ends a silence: the time-out during recovery, else a tail loss probe."""
        since = gone + self._round_trip if heard else gone
        if self._recovering or not in_order:
            self._time_out(since)
            self._prepare_round(self._window.size)
        else:
            self._send_probe(since, gone, count, arrived, heard)
            budget = self._window.size
            # If only the probe is acknowledged, recovery begins with one packet, as in Linux (`tcp_cwnd_reduction`).
            if not heard and not self._timed_out:
                budget = 1
            self._prepare_round(budget)

    def _send_probe(
        self, since: float, gone: float, count: int, arrived: int, heard: bool
    ) -> None:
        """Send one packet more, unless a delayed acknowledgement lets new packets leave before."""
        lost = count - arrived
        outstanding = lost + arrived % 2 if heard else count
        due = since + self._probe_timer(outstanding)
        delayed = gone + self._round_trip + _DELAYED_ACKNOWLEDGEMENT
        probes = True
        # The receiver acknowledges an odd packet after a delay, which restarts the timer.
        if arrived % 2 and delayed < due:
            due = delayed + self._probe_timer(lost)
            if self._unsent:
                due, probes = delayed, False
        if probes:
            self.sent += 1
            # A probe is a new packet if there is one, else the last one once more.
            renews = self._unsent > 0
            if renews:
                self._unsent -= 1
                if not self._unsent:
                    self.busy = due
            if self._draw_failure():
                if renews:
                    self._missing += 1
                self._time_out(due)
                return
            if not renews:
                self._missing = max(0, self._missing - 1)
        if lost:
            self._window.halve()
        self._now = due + self._round_trip

    def _probe_timer(self, outstanding: int) -> float:
        """Return the seconds until TCP probes after the last acknowledgement, with so many packets unacknowledged."""
        timeout = self._round_trip + RETRANSMISSION_TIMEOUT
        # The receiver may delay the acknowledgement of a single packet, so Linux waits longer (RFC 8985, 7.2).
        if outstanding == 1:
            return timeout
        return min(2 * self._round_trip + _TICK, timeout)
