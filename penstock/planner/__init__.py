"""Plans which devices hold which layers, in which order, and in which pieces a prompt enters."""
