"""What everything stands on: errors, seeds, quantities, the base of all parts of a scenario."""
