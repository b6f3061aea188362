"""What several papers share, said once, with hooks where papers differ."""
