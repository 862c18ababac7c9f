"""Attention: a backend a layer, chosen by what it supports."""
