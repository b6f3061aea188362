"""Faults, repairs and link traces: triggers, effects, and the rules by which one action undoes another."""
