"""What lies between the products of a quantised layer, compiled for the processor at hand by Numba.

A small model's step on a CPU is hundreds of operations of a microsecond each, most of it spent on calling them.
Compiled loops do the work of several at once. They go row by row, so that a row's bits do not depend on the rows
beside it.
"""
