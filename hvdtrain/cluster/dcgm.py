"""What ``dcgmi diag -r 1 -j`` says. Pure.

DCGM 3 names a test's GPUs in ``gpu_ids`` ("0,1"), under ``DCGM GPU Diagnostic``; DCGM 4 has an ``entity_group`` and an
``entity_id`` in each result, under ``DCGM Diagnostic``. NVIDIA promises no schema, so everything may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.checks.common import Verdict, ok

# DCGM_ERROR_CONFIG of dcgm_errors.h: the GPU is well and something is set otherwise than DCGM advises.
_CONFIG = 5
_MOST_SHOWN = 4
_NO_RESULT_FIX = "start DCGM's host engine there (systemctl start nvidia-dcgm), and see 'dcgmi diag -r 1'"


@dataclass(frozen=True)
class _Result:
    test: str
    entity: str
    status: str
    remarks: tuple[str, ...]
    is_setting: bool

    def __str__(self) -> str:
        where = f" ({self.entity})" if self.entity else ""
        return f"{self.test}{where}{': ' if self.remarks else ''}{' '.join(self.remarks)[:300]}"


def judge_dcgm(exit_status: int, output: str) -> Verdict:
    """A failed test names its GPU; one that fails for a setting alone, such as persistence mode, is a warning."""
    diagnostic = _diagnostic(output)
    results = list(_results(diagnostic))
    if not results:
        why = diagnostic.get("runtime_error")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        said = str(why)[:300] if why else " ".join(lines[-2:])[:300] or f"dcgmi ended with status {exit_status}"
        return "warn", f"no result: {said}", "a result of DCGM's tests", _NO_RESULT_FIX
    bad = [result for result in results if result.status in ("fail", "warn")]
    if not bad:
        passed = len({result.test for result in results if result.status == "pass"})
        return (
            ok(f"{passed} test{'s' if passed != 1 else ''} passed")
            if passed
            else ("skip", "it skips all tests", "", "")
        )
    failed = [result for result in bad if result.status == "fail" and not result.is_setting]
    shown = failed or bad
    found = "; ".join(map(str, shown[:_MOST_SHOWN])) + (
        f"; {len(shown) - _MOST_SHOWN} more" if shown[_MOST_SHOWN:] else ""
    )
    if failed:
        fix = "leave the host out, see 'dcgmi diag -r 3' and 'dmesg' there, and reset or replace the GPU"
        return "fail", found, "all of DCGM's tests pass", fix
    return "warn", found, "all of DCGM's tests pass", "set it as DCGM says; see 'dcgmi diag -r 1' there"


def _diagnostic(output: str) -> dict[str, Any]:
    """The document, before and after which there may be warnings."""
    try:
        document = json.loads(output[output.find("{") : output.rfind("}") + 1])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    found = document.get("DCGM Diagnostic", document.get("DCGM GPU Diagnostic"))
    return found if isinstance(found, dict) else {}


def _results(diagnostic: dict[str, Any]) -> Iterator[_Result]:
    for category in _objects(diagnostic.get("test_categories")):
        for test in _objects(category.get("tests")):
            results = [_result(test, result) for result in _objects(test.get("results"))]
            yield from results
            summary = test.get("test_summary")
            # What concerns no single GPU stands in the summary only.
            if isinstance(summary, dict) and not any(result.status in ("fail", "warn") for result in results):
                yield _result(test, summary)


def _result(test: dict[str, Any], result: dict[str, Any]) -> _Result:
    warnings = result.get("warnings")
    warnings = warnings if isinstance(warnings, list) else []
    texts = [warning.get("warning") if isinstance(warning, dict) else warning for warning in warnings]
    severities = [warning.get("error_severity") if isinstance(warning, dict) else None for warning in warnings]
    return _Result(
        str(test.get("name"))[:60],
        _entity(result),
        str(result.get("status")).lower(),
        tuple(str(text) for text in texts if text),
        bool(severities) and all(severity == _CONFIG for severity in severities),
    )


def _entity(result: dict[str, Any]) -> str:
    if result.get("entity_id") is not None:
        return f"{result.get('entity_group') or 'entity'} {result['entity_id']}"[:60]
    return f"GPU {result['gpu_ids']}"[:60] if result.get("gpu_ids") not in (None, "") else ""


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
