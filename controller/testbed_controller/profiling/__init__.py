"""Measurement of computing speed: device profiles for scenarios, and layer times of models."""
