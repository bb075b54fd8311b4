"""One worker thread for each model."""
