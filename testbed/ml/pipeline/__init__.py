"""Training and inference by stages in a row.

Pure: `planning` chooses stages, `placement` the state to go on from, `figures` reads the events. Run:
`program` is the one program of all devices, by hooks; `stage` carries out a schedule, `updates` changes weights;
`training` and `forwarding` feed the stages; `checkpointing` or `recovery` sets them up, anew after every loss.
"""
