"""One thread for each model, which runs its passes for every caller."""
