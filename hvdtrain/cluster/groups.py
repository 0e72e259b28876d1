"""Host names as people write them: ``node[01-63]``."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Names that ClusterShell would read as one of its own expressions, and addresses, stay as they are.
_FOLDABLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"[0-9.]+")


def fold(hosts: Iterable[str]) -> str:
    """A short text for hosts, each named once."""
    names = list(dict.fromkeys(hosts))
    foldable = [name for name in names if _FOLDABLE.fullmatch(name) and not _ADDRESS.fullmatch(name)]
    others = [name for name in names if name not in set(foldable)]
    if len(foldable) < 2:
        return ",".join(foldable + others)
    # Only where there is something to fold: the import takes as long as the rest of the command line.
    from ClusterShell.NodeSet import NodeSet

    return ",".join([str(NodeSet.fromlist(foldable)), *others])
