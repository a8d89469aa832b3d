"""Checkpoints whose weights other tools have quantised and packed; read by their layout, without those tools."""
