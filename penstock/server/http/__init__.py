"""HTTP without regard to the API: limits, keys, errors, logs, server-sent events, and an orderly shutdown."""
