"""Methods that draft with a trained head."""
