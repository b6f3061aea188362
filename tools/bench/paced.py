"""``python -m tools.bench.paced CHARGES SECONDS``: the accuracy of pacing on this host, as JSON.

``CHARGES`` is a JSON list of seconds. Pieces of work with these charges run one after another, in turns, for
``SECONDS``. Prints ``spans`` (charge, duration, late, deficit of each piece in seconds) and ``wall`` (total seconds).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from testbed_agent.pacing import Processors, constant_charge

LOAD = 0.1
"""Share of its charge in which a piece of work computes, as for small layers of torch."""


def busy_wait(seconds: float) -> None:
    """Compute for some seconds of processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measure(charges: list[float], seconds: float) -> dict[str, Any]:
    """Return ``spans`` and ``wall``, as printed."""
    processors = Processors()
    over = threading.Event()
    spans: list[list[float]] = []
    began = time.monotonic()

    def put(number: int, ready: float) -> None:
        charge = charges[number % len(charges)]

        def end(_result: Any, _failure: Any, how: Any) -> None:
            spans.append([charge, how.duration, how.late, how.deficit])
            ended = how.start + how.duration
            if ended < began + seconds:
                put(number + 1, ended)
            else:
                over.set()

        processors.put(
            lambda: busy_wait(charge * LOAD),
            constant_charge(charge),
            lambda _: True,
            end,
            ready,
        )

    put(0, began)
    # Work runs in the thread of `Processors`, which calls `end` after each piece.
    over.wait()
    return {"spans": spans, "wall": time.monotonic() - began}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]), float(sys.argv[2]))))
