"""Parts of a model under training or inference: units, layers and shares of layers on a device."""
