"""Embeddings and scores over HTTP: the bodies of their requests, and how these are run and answered."""
