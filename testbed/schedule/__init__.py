"""Pipeline schedules: pure generators of actions, drawn and checked before anything runs."""

from testbed.schedule.generators import SCHEDULES, Action, Schedule, asynchronous_1f1b, in_flight, orders, written
from testbed.schedule.timeline import ScheduleError, grid, play

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleError",
    "asynchronous_1f1b",
    "grid",
    "in_flight",
    "orders",
    "play",
    "written",
]
