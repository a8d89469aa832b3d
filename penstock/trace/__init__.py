"""Traces: written while a run goes on, read again to say where its time went."""

from penstock.trace.writer import EMULATED, TraceWriter, trace_writer

__all__ = ["EMULATED", "TraceWriter", "trace_writer"]
