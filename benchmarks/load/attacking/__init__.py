"""The attacks of benchmarks/load/attack.py: a file for each kind."""
