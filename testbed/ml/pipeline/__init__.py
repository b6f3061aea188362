"""Training and inference by stages in a row: each device computes some units and passes the result on.

`method` has the base classes of methods. Pure modules: `planning` chooses stages, `placement` the state to resume from,
`metrics` derives metrics from events. At run time, `program` is the program of all devices, parameterised by hooks;
`stage` executes a schedule, and `updates` changes weights. On the coordinator, `training` and `forwarding` feed the
stages, `checkpointing` or `recovery` configures them, again after every loss of a device, and `measuring` measures
units and links.
"""
