"""Entry point of `python -m outpace`: the command line."""

from outpace.cli import main

main()
