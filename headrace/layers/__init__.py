"""The modules that decoders are built from."""
