"""`python -m outpace` is the command line."""

from outpace.cli import main

main()
