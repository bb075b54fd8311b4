"""Further rules of acceptance: residual, typical, tiered, contrastive."""
