"""One thread for each model runs its passes, whoever asks for them."""
