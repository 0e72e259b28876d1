"""Runs in a rank's Python before its script: makes it say why it fails, also in C code, and where it hangs.

The wrapper puts this folder first on PYTHONPATH; Python imports a ``sitecustomize`` that it finds there by itself. The
interpreter may be another than hvdtrain's, so this imports nothing of it (a test compares the names with
`hvdtrain.contract`), and loads nothing that the program itself may not want. Whatever goes wrong here must not keep the
user's program from running.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

_MOST_LINES = 200
_LONGEST_LINE = 2000


def _give_way() -> None:
    """As if this folder had never been on the path: the next sitecustomize is imported, children don't get this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != here]
    if rest and rest != [""]:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this is not None:
            sys.modules.setdefault("sitecustomize", this)


def _explain_native_ends(dump_signal: int) -> None:
    """Stacks of all threads on standard error: at a crash in C code, and whenever the signal comes."""
    import faulthandler

    if not faulthandler.is_enabled():
        faulthandler.enable()
    faulthandler.register(dump_signal, all_threads=True)


def _explain_exceptions(path: str) -> None:
    """Add each exception that ends this interpreter to the file, before anything winds up."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _write_report(path, kind, error, trace)
        except Exception:
            pass
        before(kind, error, trace)

    sys.excepthook = report


def _write_report(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import json
    import time
    import traceback

    lines = [line[:_LONGEST_LINE] for line in "".join(traceback.format_exception(kind, error, trace)).splitlines()]
    if len(lines) > _MOST_LINES:
        # The script's own lines come first, the cause last.
        lines = [*lines[:20], "...", *lines[21 - _MOST_LINES :]]
    record = {"time": time.time(), "pid": os.getpid(), "exception": lines[-1], "traceback": lines}
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


try:
    _path = os.environ.pop("HVDTRAIN_REPORT", None)
    _signal = os.environ.pop("HVDTRAIN_DUMP_SIGNAL", None)
    if _path and _signal:
        _explain_exceptions(_path)
        _explain_native_ends(int(_signal))
except Exception as error:
    sys.stderr.write(f"hvdtrain: can't watch this program for failures: {error!r}\n")
_give_way()
