"""How a model is cut among ranks, and how they speak to each other."""
