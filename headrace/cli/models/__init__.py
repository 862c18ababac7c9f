"""``headrace list``, ``headrace pull`` and ``headrace remove``: the models in the hub's cache."""
