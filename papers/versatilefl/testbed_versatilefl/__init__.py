"""VersatileFL (Yoon et al.)."""
