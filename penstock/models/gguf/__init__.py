"""Checkpoints in one GGUF file, as llama.cpp reads them."""
