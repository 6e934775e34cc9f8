"""An interrupt at any point of the library's own code."""

import sys
from pathlib import Path

import tailavg

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


def interrupted(make, call, most: int):
    """Call on something new, interrupted here or there: yields each of them afterwards.

    At every instruction if there are at most so many; otherwise at as many as that, evenly spread.
    """
    call(make())  # fills what is cached
    subject = make()
    with Interrupt() as counting:
        call(subject)
    for n in range(1, counting.seen + 1, -(-counting.seen // most)):
        subject = make()
        try:
            with Interrupt(n):
                call(subject)
            raise AssertionError(f"{counting.seen} instructions before, fewer than {n} now")
        except KeyboardInterrupt:
            yield n, subject
