"""The decoder layers of most architectures in fewer, larger operations. The plain path runs transformers' own."""
