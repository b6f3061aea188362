"""Link shaping and link measurement; this package runs in the shaper's container."""
