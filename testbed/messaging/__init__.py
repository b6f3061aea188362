"""Messages between the devices of a run, who is there, and waiting for what can still come."""
