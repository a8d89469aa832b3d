"""Quantised layers in machine code that Numba makes for this processor: products, attention, and all between.

A small model's step on a CPU is hundreds of operations of a microsecond each, most of it spent on calling them.
Compiled loops do the work of many at once. They go row by row, so that a row's bits do not depend on the rows beside
it.
"""
