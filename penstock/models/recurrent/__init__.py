"""Layers that carry a state from token to token, over slots: gated delta nets, Mamba-2 and short convolutions."""
