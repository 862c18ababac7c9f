"""Families of hybrid models, whose layers keep a state in place of KV or beside it."""
