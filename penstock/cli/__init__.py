"""The command line: ``penstock generate``, ``demo``, ``serve``, ``bench``, ``simulate`` and the rest, a file each."""

from penstock.cli.app import main

__all__ = ["main"]
