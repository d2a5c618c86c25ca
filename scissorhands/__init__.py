"""The core of Scissorhands: budgets, eviction policies, evidence, codecs and the resident cache.

What decides (``budget``, ``policies``, ``plan``, ``ledger``) is numpy and plain Python. What touches the device
(``cache``, ``attention``, ``signals``, ``codec``) is torch. Nothing is imported here, so that the manager can use the
first half without torch.
"""

__version__ = "0.1.0"
