"""What several methods are made of: numerics of a shard, order of samples, a stage's worker, a lead that recovers."""
