"""One decoder under atheris, which looks for inputs that reach new code; `tests/fuzz.py` starts it.

    python -m support.fuzz_decoder NAME INPUTS SEED REPORT FOLDER

The first byte of an input says whether the rest is sealed, that is, given the right sizes and checksum.
"""

import json
import os
import resource
import sys
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["scissorhands"]):
    from support.fuzzed_bytes import DECODERS, allocated, examples, most_allocated

# Of address space beyond what the process has before the first input.
_MOST_MEMORY = 512 << 20
_MOST_FINDINGS = 20
_MOST_INPUT = 4096


class Watch:
    """Gives inputs to a decoder, and notes what it does wrong.

    Args:
        name: Name of the decoder.
        count: Inputs to give.
        report: File for what was found, written after the last input.
    """

    def __init__(self, name, count, report):
        self._read, self._seal = DECODERS[name]
        self._count, self._report = count, report
        self._done, self._whole, self._sealed, self._peak, self._share = 0, 0, 0, 0, 0.0
        self._findings = {}

    def take(self, raw):
        """Give one input; end the process after the last."""
        sealed, data = bool(raw[:1]) and bool(raw[0] & 1), raw[1:]
        data = self._seal(data) if sealed else data
        self._sealed += sealed
        try:
            peak = allocated(self._observed, data)
        except Exception as error:  # noqa: BLE001 - Whatever it is, it is what is looked for.
            self._note(traceback.format_exception_only(error)[-1].strip(), data)
        else:
            self._peak, self._share = max(self._peak, peak), max(self._share, peak / most_allocated(data))
            if peak > most_allocated(data):
                self._note("allocates more than its bound", data)
        self._done += 1
        if self._done == self._count:
            self._finish()

    def _observed(self, data):
        self._whole += self._read(data)

    def _note(self, fault, data):
        if len(self._findings) < _MOST_FINDINGS:
            self._findings.setdefault(fault, data.hex())

    def _finish(self):
        found = {
            "inputs": self._done,
            "sealed": self._sealed,
            "whole": self._whole,
            "peak_bytes": self._peak,
            "peak_over_bound": round(self._share, 3),
            "findings": [{"fault": fault, "input": data} for fault, data in self._findings.items()],
        }
        self._report.write_text(json.dumps(found))
        # libFuzzer has no way to be told that it is done.
        os._exit(0)


def main():
    """Run one decoder."""
    name, count, seed, report, folder = sys.argv[1:]
    corpus = Path(folder)
    for index, data in enumerate(examples(name)):
        for sealed in (0, 1):
            (corpus / f"{index}-{sealed}").write_bytes(bytes([sealed]) + data)
    watch = Watch(name, int(count), Path(report))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    options = [f"-seed={seed}", f"-max_len={_MOST_INPUT}", "-timeout=10", "-verbosity=0", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], watch.take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
