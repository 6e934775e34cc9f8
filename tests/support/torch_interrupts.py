"""An interrupt at any point of the library's own code."""

import os
import sys
from pathlib import Path

import tailavg

EVERY = int(os.environ.get("TAILAVG_INTERRUPTS", "400"))  # 100000 takes minutes
SOME = 50
PACKAGE = str(Path(tailavg.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt before the n-th instruction of Python that the library runs."""

    def __init__(self, n: int = 0):
        self.n, self.seen = n, 0

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.n:
                raise KeyboardInterrupt
        return self._trace


def interrupted(make, call):
    """Call on something new, interrupted here or there: yields each of them afterwards.

    A short call is interrupted at every instruction, a long one at some, evenly spread.
    """
    call(make())  # fills what is cached
    subject = make()
    with Interrupt() as counting:
        call(subject)
    step = 1 if counting.seen <= EVERY else counting.seen // SOME
    for n in range(1, counting.seen + 1, step):
        subject = make()
        try:
            with Interrupt(n):
                call(subject)
            raise AssertionError(f"{counting.seen} instructions before, fewer than {n} now")
        except KeyboardInterrupt:
            yield n, subject
