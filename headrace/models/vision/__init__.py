"""Vision parts: what they are, and the encoders that run them."""
