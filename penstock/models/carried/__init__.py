"""Models whose rows carry more from layer to layer than hidden states: per-layer embeddings, shared keys and values."""
