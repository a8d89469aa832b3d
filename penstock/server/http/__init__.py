"""What any HTTP service needs: limits, keys, errors, logs, server-sent events, and an end in good order."""
