"""What was found of hosts within the last hour, so that the next launch on them needn't ask again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.cluster.models import Request
from hvdtrain.cluster.network import Network
from hvdtrain.hosts.models import Host

KEPT_S = 3600.0
_MOST_FILES = 100


@dataclass(frozen=True)
class Known:
    """What is remembered of hosts.

    Attributes:
        network: by which they reach each other.
        rank_order: their names as a ring, if their links were measured.
    """

    network: Network
    rank_order: tuple[str, ...] | None = None


def recall(hosts: Sequence[Host], request: Request, looked: str = "quick", now: float | None = None) -> Known | None:
    """What is known of hosts that were checked well within the last hour, in the same way; None if they weren't.

    Args:
        hosts: all of them.
        request: what was asked.
        looked: the level, and whatever else was measured.
        now: Unix seconds.
    """
    try:
        data = json.loads(_file(hosts, request, looked).read_text())
        age_s = (now or time.time()) - float(data["time"])
        order = data["rank_order"]
        known = Known(Network.from_json(data["network"]), order and tuple(map(str, order)))
        return known if 0 <= age_s < KEPT_S else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(hosts: Sequence[Host], request: Request, known: Known, looked: str = "quick") -> None:
    """Keep what was found. A folder that can't be written costs the next launch its time, nothing else."""
    file = _file(hosts, request, looked)
    temporary = file.with_suffix(f".{os.getpid()}")
    data = {"time": time.time(), "network": known.network.to_json(), "rank_order": known.rank_order}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as written:
            json.dump(data, written)
        temporary.replace(file)
        for old in sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
            old.unlink()


def _file(hosts: Sequence[Host], request: Request, looked: str) -> Path:
    """One for each launching machine, set of hosts and way of asking them; scripts count with their content."""
    scripts = {}
    for name in request.files:
        with contextlib.suppress(OSError):
            scripts[name] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
    asked = {"hosts": [asdict(host) for host in hosts], "request": asdict(request), "scripts": scripts}
    everything = [__version__, socket.gethostname(), os.getuid(), asked, looked]
    key = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hvdtrain" / "hosts" / f"{key}.json"
