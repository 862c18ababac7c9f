from support.engine.fixtures import text, tiny_folder

__all__ = ["text", "tiny_folder"]
