"""Runs on containers: start, scheduled faults and traces, events, and fidelity checks."""
