"""Multimodal prompts: what a request carries, and the processors that turn it into tokens and items."""
