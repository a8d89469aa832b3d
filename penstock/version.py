"""The release: the one place that states its number."""

__version__ = "0.1.0"
