"""Pipeline schedules: pure generators of actions, drawn and checked before anything runs."""

from testbed.schedule.actions import Action, Schedule, in_flight, orders
from testbed.schedule.synchronous import SCHEDULES
from testbed.schedule.timeline import ScheduleError, check, grid, play

__all__ = ["SCHEDULES", "Action", "Schedule", "ScheduleError", "check", "grid", "in_flight", "orders", "play"]
