"""The file a user writes: its schema, its units, its expansion into experiments, and what is checked before a run."""
