"""Which devices hold which layers, in which order, and in which pieces a prompt enters: reckoned, then simulated."""
