"""The command line: outpace generate | chat | bench | show | methods | shelf. A module adds its commands when imported."""

from outpace.cli import bench, catalogue, generate, show
from outpace.cli.common import app

__all__ = ["app", "bench", "catalogue", "generate", "main", "show"]


def main() -> None:
    app()
