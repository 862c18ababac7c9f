"""From logits to tokens: the sampler, and a file a feature."""
