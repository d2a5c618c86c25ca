"""What holds for all tests."""

import os

# Small models gain nothing from threads, and tests that share a machine lose much by them. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
