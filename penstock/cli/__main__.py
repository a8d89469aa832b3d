"""``python -m penstock.cli``, for launchers that start a module."""

from penstock.cli.app import main

main()
