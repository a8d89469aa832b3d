"""Devices and links that nobody here owns: stages, links and drafters take the times that a cluster file models.

What is computed is real; it is handed on when the modelled device and link would have. A real engine runs none of this:
its stages have the ``Device`` and the ``Link`` of ``penstock.stage.device``, which take no other time than they do.
"""
