"""What all tests share."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
