"""KV tensors: one a layer, exactly as large as its heads and widths need."""
