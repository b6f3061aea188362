"""The file a user writes: its schema, its units, its expansion into an experiment."""
