"""Threading: one worker thread per model, which runs its passes for all callers."""
