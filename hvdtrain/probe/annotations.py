"""`Any` for annotations that nobody evaluates: loading ``typing`` takes a host as long as half of the sections do."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any as Any
else:
    Any = object
