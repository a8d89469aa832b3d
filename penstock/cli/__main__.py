"""``python -m penstock.cli``, for launchers that start a module."""

from penstock.cli.app import main

if __name__ == "__main__":  # a process that is spawned imports this module again
    main()
