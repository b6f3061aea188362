"""Pipeline schedules: pure generators of actions, drawn and checked before anything runs."""

from testbed.schedule.actions import Action, Schedule, in_flight, orders
from testbed.schedule.asynchronous import asynchronous_1f1b
from testbed.schedule.synchronous import SCHEDULES
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
]
