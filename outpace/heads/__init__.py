"""Small trained networks that draft for one target from the hidden states it leaves."""
