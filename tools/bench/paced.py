"""``python -m tools.bench.paced CHARGES SECONDS``: the accuracy of pacing on this host, as JSON.

``CHARGES`` is a JSON list of charged times in seconds. Pieces of work run one after another for ``SECONDS``, each with
the next time of the list, which begins again after its end. Prints ``spans``, a list of (charge, duration, late,
deficit) of each piece in seconds, and ``wall``, the total seconds. ``deficit`` is the time by which the computation
exceeded its charge; ``late`` also includes late starts and wake-ups of the host (`testbed_agent.pacing.WorkTimes`).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from testbed_agent.pacing import Processors, WorkTimes, constant_charge

COMPUTED_SHARE = 0.1
"""Share of its charge in which a piece of work computes, as for small layers of torch."""


def busy_wait(seconds: float) -> None:
    """Compute for some seconds of processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measure(charges: list[float], seconds: float) -> dict[str, Any]:
    """Return ``spans`` and ``wall``, as printed."""
    processors = Processors()
    all_done = threading.Event()
    spans: list[list[float]] = []
    began = time.monotonic()

    def put(number: int, ready: float) -> None:
        charge = charges[number % len(charges)]

        def begin(_start: float) -> bool:
            # False would skip the work.
            return True

        # A failure need not be handled, since `busy_wait` has none.
        def end(_result: Any, _failure: Any, times: WorkTimes) -> None:
            spans.append([charge, times.duration, times.late, times.deficit])
            ended = times.start + times.duration
            if ended < began + seconds:
                put(number + 1, ended)
            else:
                all_done.set()

        processors.put(
            lambda: busy_wait(charge * COMPUTED_SHARE),
            constant_charge(charge),
            begin,
            end,
            ready,
        )

    put(0, began)
    # Work runs in the thread of `Processors`, which calls `end` after each piece.
    all_done.wait()
    return {"spans": spans, "wall": time.monotonic() - began}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]), float(sys.argv[2]))))
