"""The command line: outpace generate | chat | show | methods | shelf. A module adds its commands when imported."""

from outpace.cli import catalogue, generate, show
from outpace.cli.common import app

__all__ = ["app", "catalogue", "generate", "main", "show"]


def main() -> None:
    app()
