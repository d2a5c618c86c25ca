"""The heap keeps blocks of megabytes: a process of its own that asks for them again and again maps them once."""

import subprocess
import sys

PROGRAM = """
import resource, sys
from scissorhands_server.heap import keep_large_blocks
if sys.argv[1] == "keep":
    assert keep_large_blocks()
before = 0
for number in range(60):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [b"x" * 4_000_000 for _ in range(12)]
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_large_blocks_are_mapped_once():
    assert 5 * faults("keep") < faults("leave")
