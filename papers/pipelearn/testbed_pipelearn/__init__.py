"""PipeLearn (Zhang et al., 2022)."""
