"""Training and inference by stages in a row.

Pure modules: `planning` chooses stages, `placement` the state to resume from, `metrics` derives metrics from events. At
run time, `program` is the program of all devices, parameterised by hooks; `stage` executes a schedule, `updates`
changes weights; `training` and `forwarding` feed the stages; `checkpointing` or `recovery` configures them, again after
every loss of a device.
"""
