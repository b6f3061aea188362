"""Messages between the devices of a run, their membership, and waits that end when a device fails."""
