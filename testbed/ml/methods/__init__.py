"""Methods that train or infer: baselines, and published systems."""
