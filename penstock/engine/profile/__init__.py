"""What a model's layers take on the devices at hand: measured, stored, and as a cluster to plan for."""
