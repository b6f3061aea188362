"""How a model is trained: optimizer, schedule, loss, clipping, averaging, by the names and with the code of torch."""
