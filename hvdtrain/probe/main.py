"""The dialogue with the launcher: a request a line of JSON on stdin, an answer a line of JSON on stdout.

Each request is ``{"id": number, "ask": verb, …}`` and is answered by ``{"id": number, …}`` in the same order; one that
can't be met gets ``{"id": number, "failed": text}``. The verbs:

``facts``: ``sections``, ``python``, ``paths``, ``write``, ``files`` → ``facts``, ``errors``.
``clock``: → ``time_unix_s``.
``listen`` → ``port``, ``ports``, ``identity``; ``connect`` with ``targets``, ``timeout_s`` → ``results``: see `reach`.
``expect`` and ``exchange``, ``disk-speed``, ``memory-speed``: see `measure`.
``tool``, ``ib-write-bw-serve`` and ``ib-write-bw``: see `tools`.
The verbs of `VERBS` are functions of other modules, loaded when they are first asked for.

The program ends with its stdin, whatever it is busy with, so nothing of it can be left on a host.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time

from hvdtrain.probe.annotations import Any

SECTIONS = ("system", "limits", "disks", "software", "gpus", "network", "infiniband")
# What a section takes from the request, beside the root.
_OPTIONS = {"disks": ("paths", "write"), "software": ("python", "files")}
# Verb -> module and function: `function(request: dict) -> dict`.
VERBS = {
    "listen": ("hvdtrain.probe.reach", "listen"),
    "connect": ("hvdtrain.probe.reach", "connect"),
    "expect": ("hvdtrain.probe.measure", "expect"),
    "exchange": ("hvdtrain.probe.measure", "exchange"),
    "disk-speed": ("hvdtrain.probe.measure", "disk_speed"),
    "memory-speed": ("hvdtrain.probe.measure", "memory_speed"),
    "tool": ("hvdtrain.probe.tools", "tool"),
    "ib-write-bw-serve": ("hvdtrain.probe.tools", "ib_write_bw_serve"),
    "ib-write-bw": ("hvdtrain.probe.tools", "ib_write_bw"),
}
_LONGEST_REQUEST_BYTES = 8 << 20


def main() -> None:
    """Answer requests until stdin ends."""
    # Whatever a module prints by mistake must not get into the dialogue.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        answers.write(json.dumps(_answer(requests.get())) + "\n")
        answers.flush()


def _read(requests: queue.Queue[bytes]) -> None:
    """Pass lines on; at the end of stdin end the process, also out of the middle of a measurement."""
    try:
        # The stream that the sources came through: it may hold the first request already.
        while line := sys.stdin.buffer.readline(_LONGEST_REQUEST_BYTES):
            requests.put(line)
    finally:
        os._exit(0)


def _answer(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        number, verb = request["id"], request["ask"]
    except (ValueError, KeyError, TypeError):
        return {"id": None, "failed": "this is no request"}
    try:
        return {"id": number, **_perform(verb, request)}
    except Exception as error:  # Whatever goes wrong on a host must be told to the launcher.
        return {"id": number, "failed": _described(error)}


def _perform(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    if verb == "clock":
        return {"time_unix_s": time.time()}
    if verb == "facts":
        return _facts(request)
    if verb not in VERBS:
        raise ValueError(f"there is no verb {verb!r}")
    module, function = VERBS[verb]
    answer: dict[str, Any] = getattr(importlib.import_module(module), function)(request)
    return answer


def _facts(request: dict[str, Any]) -> dict[str, Any]:
    facts, errors = {}, {}
    for section in request.get("sections") or SECTIONS:
        if section not in SECTIONS:
            errors[section] = "there is no such section"
            continue
        options = {name: request[name] for name in _OPTIONS.get(section, ()) if request.get(name)}
        try:
            facts[section] = importlib.import_module(f"hvdtrain.probe.{section}").collect(**options)
        except Exception as error:  # One unreadable thing must not hide the others.
            errors[section] = _described(error)
    return {"facts": facts, "errors": errors}


def _described(error: Exception) -> str:
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(place[0].filename)}:{place[0].lineno})" if place else ""  # noqa: PTH119
    return f"{type(error).__name__}: {error}{where}"[:1000]


if __name__ == "__main__":
    main()
