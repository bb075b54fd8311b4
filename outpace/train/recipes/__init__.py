"""Training recipes: what is trained, and on which loss."""
