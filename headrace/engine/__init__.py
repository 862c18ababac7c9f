"""The core loop, its process, and the clients of it."""
