"""Traces: written during a run, and read again to explain where its time went."""

from __future__ import annotations

from penstock.trace.writer import EMULATED, TraceWriter, trace_writer

__all__ = ["EMULATED", "TraceWriter", "trace_writer"]
