"""EdgePipe (Yoon et al., 2022)."""
