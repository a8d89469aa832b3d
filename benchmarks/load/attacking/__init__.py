"""What benchmarks/load/attack.py tries: a file for each kind of attack."""
