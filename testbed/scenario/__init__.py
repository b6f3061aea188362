"""Scenario files: schema, units, validation, and expansion into experiments."""
