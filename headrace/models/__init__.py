"""Native and foreign models: the common decoder, the registry, and readers of configurations."""
