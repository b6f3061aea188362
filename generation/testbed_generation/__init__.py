"""Generation of text by decoder-only language models over edge devices: model family, workload, planners, methods."""
