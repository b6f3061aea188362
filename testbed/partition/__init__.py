"""Pure planners: costs in, plan out."""
