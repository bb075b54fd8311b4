"""What users hold: load, Model, Request, Stream."""
