"""The agent: the process in a device's container, which runs the device's program."""
