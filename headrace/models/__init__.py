"""What families share: the common decoder, the registry, and how configurations are read."""
