from engine.fixtures import frontend, tiny_folder

__all__ = ["frontend", "tiny_folder"]
