"""Trains learned drafters for a target from its own hidden states: ``penstock train``."""
