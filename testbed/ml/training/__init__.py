"""Training configuration: optimizer, schedule, loss, clipping, averaging, by torch's names and with its code."""
