"""What every side of the testbed shares: scenarios, links, models, planners, schedules, methods.

Imports neither ``agent`` nor ``controller`` and touches no Docker and no sockets.
"""

__version__ = "0.1.0"
