"""Whether the job's folders and files are there, and room on their disks."""

from __future__ import annotations

from hvdtrain.cluster.checks.common import Verdict, by_host, equal, ok, size
from hvdtrain.cluster.models import Evidence, Finding

MIN_FREE_BYTES = 1 << 30
MIN_FREE_INODES = 10_000


def looked_at(evidence_paths: tuple[str, ...], directory: str | None) -> tuple[str, ...]:
    """The paths that are asked for."""
    return (*((directory,) if directory else ()), *evidence_paths)


def check(evidence: Evidence) -> list[Finding]:
    """Working directory, data paths, scripts, space and inodes."""
    request = evidence.request
    findings = []
    for path in looked_at(request.paths, request.directory):
        name = "directory" if path == request.directory else f"path {path}"
        findings += by_host(evidence, "files", name, lambda host, path=path: _there(evidence, host, path))  # type: ignore[misc]
    paths = (*looked_at(request.paths, request.directory), "/tmp")  # noqa: S108
    findings += by_host(evidence, "files", "disk-space", lambda host: _space(evidence, host, paths))
    findings += by_host(evidence, "files", "inodes", lambda host: _inodes(evidence, host, paths))
    for path in request.files:
        sums = {host: evidence.value(host, "software", "files", path, "sha256") for host in evidence.reached}
        shown = {host: text[:12] if isinstance(text, str) else None for host, text in sums.items()}
        fix = f"copy {path} from a host with {{value}}"
        findings += equal(evidence, "files", f"file {path}", shown, fix, none="not there")
    return findings


def _there(evidence: Evidence, host: str, path: str) -> Verdict:
    facts = evidence.value(host, "disks", "paths", path) or {}
    is_directory = path == evidence.request.directory
    if not facts.get("exists"):
        return "fail", f"{path} doesn't exist", path, "make it there, mount it, or correct the path"
    if not facts.get("readable") or (is_directory and not (facts.get("is_dir") and facts.get("executable"))):
        return "fail", f"{path} can't be read or entered", "a readable path", "check its permissions there"
    return ok(path)


def _space(evidence: Evidence, host: str, paths: tuple[str, ...]) -> Verdict:
    for path in paths:
        free = evidence.value(host, "disks", "paths", path, "free_bytes")
        if isinstance(free, int) and free < MIN_FREE_BYTES:
            fix = f"free space on {evidence.value(host, 'disks', 'paths', path, 'mount_point')}"
            return "fail", f"{size(free)} free for {path}", f"at least {size(MIN_FREE_BYTES)}", fix
    return ok()


def _inodes(evidence: Evidence, host: str, paths: tuple[str, ...]) -> Verdict:
    for path in paths:
        free = evidence.value(host, "disks", "paths", path, "free_inodes")
        total = evidence.value(host, "disks", "paths", path, "total_inodes")
        if isinstance(free, int) and total and free < MIN_FREE_INODES:
            fix = f"remove small files on {evidence.value(host, 'disks', 'paths', path, 'mount_point')}"
            return "fail", f"{free} inodes free for {path}", f"at least {MIN_FREE_INODES}", fix
    return ok()
