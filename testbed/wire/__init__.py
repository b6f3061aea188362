"""Messages, broadcasts and tensors between devices: their encodings and their sizes on the wire."""
