"""The live display of a run: stage, progress, speed, loss, and faults."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from testbed.trace.events import Event

SHOWN_EVENTS = (
    "step",
    "request",
    "evaluate",
    "failed",
    "fault",
    "recovery",
    "state",
    "log",
)
"""Event types that `LiveProgress.event` accepts."""
SPEED_WINDOW = 20
"""The displayed speed is the average over this number of steps."""
REPORT_SHARE = 0.1
"""Share of a run between two printed lines, if the output is not a terminal and has no bar."""
ERROR_STYLE = "bold red"


class LiveProgress:
    """The progress display of one run: redrawn in place on a terminal, otherwise one line for each important event."""

    def __init__(
        self, console: Console, title: str, total: int | None, unit: str
    ) -> None:
        self._console = console
        self._total = total
        self._unit = unit
        self._lock = threading.Lock()
        self._stage = "preparing"
        self._completed = 0
        """Number of completed steps or requests."""
        self._step_times: deque[float] = deque(maxlen=SPEED_WINDOW)
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._next_report = REPORT_SHARE
        """Share of the run at which the next line is printed, without a bar."""
        self._bar = Progress(
            TextColumn(f"[bold]{title}[/]"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._bar.add_task("", total=total)
        self._live = Live(
            console=console,
            refresh_per_second=8,
            get_renderable=self._render,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def stage(self, text: str) -> None:
        """Show the current stage of the run."""
        with self._lock:
            self._stage = text
            self._console.print(Text(text, style="cyan"))

    def event(self, event: Event) -> None:
        """Update the display with an event."""
        with self._lock:
            if event.event in ("step", "request"):
                self._advance(event)
            elif event.event == "evaluate":
                self._accuracy = event.fields.get("accuracy")
            else:
                self._print_line(event)

    def _print_line(self, event: Event) -> None:
        message = _describe_event(event)
        if message is not None:
            text, style = message
            self._console.print(Text(f"{event.time:8.2f} s  {text}", style=style))

    def _advance(self, event: Event) -> None:
        # An event `step` has its number, from 0, in the field `step`, and an event `request` in the field `request`.
        # Steps are repeated after a checkpoint is restored: the bar shows the highest number, and the speed includes
        # repeated steps.
        number = int(event.fields.get(event.event, self._completed))
        self._completed = max(self._completed, number + 1)
        self._loss = event.fields.get("loss", self._loss)
        self._step_times.append(event.time)
        self._bar.update(self._task, completed=self._completed)
        if not self._total or self._console.is_terminal:
            return
        # A file or a pipe gets a line for each tenth of the run instead of the bar.
        share = self._completed / self._total
        if share >= self._next_report:
            self._next_report = share + REPORT_SHARE
            progress = f"{self._completed}/{self._total} {self._unit}"
            line = f"{event.time:8.2f} s  {progress}  {self._format_metrics()}"
            self._console.print(Text(line))

    def _format_metrics(self) -> str:
        parts = []
        times = self._step_times
        if len(times) > 1 and times[-1] > times[0]:
            speed = (len(times) - 1) / (times[-1] - times[0])
            parts.append(f"{speed:.1f} {self._unit}/s")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        if self._accuracy is not None:
            parts.append(f"accuracy {self._accuracy:.1%}")
        return "  ".join(parts)

    def _render(self) -> Group:
        return Group(
            self._bar, Text(f"{self._stage}  {self._format_metrics()}", style="cyan")
        )


def _describe_event(event: Event) -> tuple[str, str] | None:
    """Return the text and style of a displayed event; None for other events."""
    fields = event.fields
    match event.event:
        case "failed":
            text = f"request {fields.get('request')} failed: {fields.get('error')}"
            return text, ERROR_STYLE
        case "fault":
            # In the words of the table of faults in the report.
            verb = "reverted" if fields.get("phase") == "undo" else "injected"
            target = fields.get("target") or ""
            return f"fault {verb}: {fields.get('action')} {target}", ERROR_STYLE
        case "recovery":
            text = f"recovery {fields.get('phase')}"
            # Methods without training steps, such as methods for generation, record recoveries without a step.
            if "step" in fields:
                text += f" at step {fields['step']}"
            missing = ", ".join(fields.get("missing", ()))
            if missing:
                text += f": {missing} silent"
            return text, "yellow"
        case "state" if fields.get("state") == "failed":
            return f"{event.device} failed", ERROR_STYLE
        case "log":
            return f"{event.device}: {fields.get('text')}", "dim"
    return None
