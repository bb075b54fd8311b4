"""The command line: outpace generate | chat | verify | bench | advise | show | methods | shelf.

A module adds its commands to the application when it is imported.
"""

from outpace.cli import advise, bench, catalogue, generate, show, verify
from outpace.cli.common import app

__all__ = ["advise", "app", "bench", "catalogue", "generate", "main", "show", "verify"]


def main() -> None:
    app()
