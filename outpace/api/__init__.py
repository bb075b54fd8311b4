"""The public API: load, Model, Request, Stream."""
