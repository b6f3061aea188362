"""A run on containers: start, faults and traces on cue, events, fidelity."""
