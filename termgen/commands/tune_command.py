"""`termgen tune`: measure which kernels multiply fastest for a model on this GPU, and keep it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from termgen.commands.exit_codes import OK
from termgen.errors import CacheError
from termgen.library.catalog import resolve_model
from termgen.system.idle_process import run_while_owned

if TYPE_CHECKING:
    from termgen.engine.device.runner.tuning import TunedShape

SHOWN_ROWS = (1, 8, 32)
"""Numbers of rows whose gain is printed."""
WIDTH = 16


def tune_model(name: str | None, *, again: bool, in_background: bool, quantization: str) -> int:
    """Measure the model's shapes, printing each as it is done. The last line sums it up.

    in_background: started by an engine, with which it ends. quantization: with which the model is
    to run. Raises TermgenError.
    """
    if in_background:
        run_while_owned(sys.stdin.read)
    local = resolve_model(name)
    from termgen.engine.device.runner.tuning import plan  # torch: seconds

    tuning = plan(local.path, again=again, quantization=quantization)
    if not tuning.missing:
        what = f"all {len(tuning.shapes)} shapes of {local.name} have been measured on this GPU"
        print(f"{what} (--again measures them again)")
        return OK
    started = time.perf_counter()
    print(f"{local.name} on {tuning.tables.gpu.name}: {len(tuning.missing)} shapes to measure")
    heads = [f"{rows} row{'s' if rows > 1 else ''}" for rows in SHOWN_ROWS]
    width = max(WIDTH, *(len(str(shape)) + 2 for shape in tuning.missing))
    print(_line("WEIGHT", *heads, "TOOK", width=width), flush=True)
    try:
        for shape in tuning.run():
            print(_describe(shape, width), flush=True)
    except OSError as error:
        reason = error.strerror or str(error)
        folder = tuning.tables.folder
        what = f"cannot write to {folder}: {reason}; TERMGEN_CACHE sets another folder"
        raise CacheError(what) from None
    took = time.perf_counter() - started
    count = len(tuning.missing)
    shapes = "1 shape" if count == 1 else f"{count} shapes"
    print(f"measured {shapes} in {took:.0f} s: engines that start from now on use them")
    return OK


def _describe(tuned: TunedShape, width: int) -> str:
    """Times of the chosen products, and in percent of cuBLAS's."""
    cells = []
    for rows in SHOWN_ROWS:
        found = tuned.found[rows]
        share = 100 * found.chosen_seconds / found.library_seconds
        cells.append(f"{found.chosen_seconds * 1e6:.1f} us {share:.0f}%")
    return _line(str(tuned.shape), *cells, f"{tuned.seconds:.1f} s", width=width)


def _line(first: str, *cells: str, width: int) -> str:
    """width: of the first cell."""
    return (f"{first:<{width}}" + "".join(f"{cell:<{WIDTH}}" for cell in cells)).rstrip()
