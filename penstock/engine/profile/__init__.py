"""Times of a model's layers on the devices at hand: measured, stored, and turned into a cluster to plan for."""
