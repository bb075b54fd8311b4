"""The version of the package, in a file of its own so that building imports nothing heavy."""

__version__ = "0.1.0"
