"""Neural networks as chains of units."""
