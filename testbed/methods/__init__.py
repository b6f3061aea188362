"""Published systems and baselines, one folder each."""
