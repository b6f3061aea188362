"""Training and inference methods: baselines and published systems."""
