"""What travels between devices: messages, casts, tensors, and what each weighs on the wire."""
