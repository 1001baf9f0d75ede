"""Starts a command that the kernel kills when this program dies: `launcher.py PARENT COMMAND ...`.

Run as a script by a bare interpreter, and replaced by the command at once. The signal is sent at
the death of the thread that started it.
"""

from __future__ import annotations

import os
import signal
import sys

NOT_STARTED = 127
PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died before the signal was asked for
            sys.exit(NOT_STARTED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
