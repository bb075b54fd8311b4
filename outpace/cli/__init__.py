"""One file for each command.

A module adds its commands to the application when it is imported.
"""

import gc

from outpace.cli import advise, bench, calibrate, catalogue, generate, show, verify
from outpace.cli.common import app
from outpace.cli.serving import batch, serve
from outpace.cli.training import head, prune, train

__all__ = [
    "advise", "app", "batch", "bench", "calibrate", "catalogue", "generate", "head", "main", "prune", "serve", "show",
    "train", "verify",
]  # fmt: skip


def main() -> None:
    gc.disable()  # until a model is loaded: garbage collection takes a quarter of the import time
    app()
