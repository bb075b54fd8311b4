"""What is trained, and by which loss."""
