"""`metrics.jsonl`: what a run measures, one JSON object a line. Rank 0 writes it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hvdtrain import contract


class MetricsFile:
    """Appends records to the run directory's ``metrics.jsonl``; on other ranks than 0 it does nothing."""

    def __init__(self, run_directory: Path, *, rank: int, attempt: int) -> None:
        self._common = {"attempt": attempt, "rank": rank}
        self._file = None
        if rank == 0:
            run_directory.mkdir(parents=True, exist_ok=True)
            self._file = (run_directory / contract.METRICS_FILE).open("a", buffering=1)

    def write(self, **values: Any) -> None:
        """Append one record; ``time`` (Unix seconds), ``attempt`` and ``rank`` are added."""
        if self._file:
            self._file.write(json.dumps({"time": time.time(), **self._common, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
