"""Machine learning on the testbed: models, data, training, partitioning, and what methods share."""
