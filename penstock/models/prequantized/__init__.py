"""Checkpoints whose weights other tools have rounded and packed before: read by their layout, without these tools."""
