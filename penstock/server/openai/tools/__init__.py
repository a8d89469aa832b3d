"""Tool calls: how tools are described to models, and how calls are read from their replies."""
