"""Common parts of methods training one model on the data of several devices: planning, programs, metrics."""
