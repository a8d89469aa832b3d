"""Tool calls: how models are told of tools, and how calls are read from what they write."""
