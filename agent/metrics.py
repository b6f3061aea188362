"""``GET /metrics`` in Prometheus' text format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.runner import Runner

STATES = ("idle", "ready", "running", "finished", "failed", "stopped")


def resident_bytes() -> int:
    """Return the memory this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def memory_limit() -> int | None:
    """Return what the container may hold, where that is limited."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            # Version 1 writes "no limit" as the largest number of pages.
            return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def exposition(runner: Runner) -> str:
    """Return what the device did and holds, one family after the other."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP testbed_{name} {text}")
        lines.append(f"# TYPE testbed_{name} {kind}")
        lines.extend(
            f"testbed_{name}{labels} {value:g}" if value != int(value) else f"testbed_{name}{labels} {int(value)}"
            for labels, value in values.items()
        )

    family(
        "state",
        "gauge",
        "1 for the state the device is in.",
        {f'{{state="{state}"}}': state == runner.state for state in STATES},
    )
    family("resident_bytes", "gauge", "Memory the agent holds.", {"": resident_bytes()})
    family("speed_factor", "gauge", "Share of its own speed that the processor goes at.", {"": runner.pace.factor})
    family("events_total", "counter", "Events recorded.", {"": runner.log.count})
    device = runner.device
    if device is not None:
        totals = device.totals
        family(
            "compute_seconds_total",
            "counter",
            "Time the program's work took on this device.",
            {"": totals.compute_seconds},
        )
        family(
            "deficit_seconds_total",
            "counter",
            "Time by which the host was slower than the device.",
            {"": totals.deficit_seconds},
        )
        family(
            "late_seconds_total",
            "counter",
            "Time by which the host made the program's work late.",
            {"": totals.late_seconds},
        )
        family("sent_bytes_total", "counter", "Bytes of acknowledged messages and of casts.", {"": totals.bytes_sent})
        family("received_bytes_total", "counter", "Bytes of messages that arrived.", {"": totals.bytes_received})
        family("sent_messages_total", "counter", "Messages acknowledged, and casts.", {"": totals.messages_sent})
        family("received_messages_total", "counter", "Messages that arrived.", {"": totals.messages_received})
        family("inbox_messages", "gauge", "Messages that wait for the program.", {"": device.waiting})
        family("inbox_bytes", "gauge", "Memory of messages that wait or arrive.", {"": device.inbox.bytes})
        family("compute_queue", "gauge", "Pieces of work that wait for the processor.", {"": device.processors.waiting})
        family(
            "send_queue",
            "gauge",
            "Messages on their way to each peer.",
            {f'{{peer="{peer}"}}': lane.waiting for peer, lane in list(device.lanes.items())},
        )
    return "\n".join(lines) + "\n"
