"""Emulated stages, links and drafters, which take the times that a cluster file models for devices we do not have.

The computation is real; its outcome is held back until the modelled device and link would have delivered it. A real
engine runs none of this code: its stages have the ``Device`` and the ``Link`` of ``penstock.stage.driver``, which add
no time of their own.
"""
