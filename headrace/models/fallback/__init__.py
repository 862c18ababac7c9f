"""Foreign models on headrace's attention: the library builds the model, headrace replaces its inner attention."""
