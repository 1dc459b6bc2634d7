"""Benchmarks: each one prints a table and says whether its bars are met; see README.md."""

import os

# Before numpy and torch are imported: one thread a process, as in a serving stack
# whose ranks share a host.
os.environ.setdefault("OMP_NUM_THREADS", "1")
