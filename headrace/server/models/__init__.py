"""Several models in one server: which request is for which model, and which models are in memory."""
