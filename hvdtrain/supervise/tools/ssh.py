"""What stands for ssh: asks the supervisor to run a command on a host, and ends as it does.

Run as a script, by ``-I -S`` for a quick start: one of these runs for each worker on another host. The command comes in
the environment, which only its owner can read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from hvdtrain import contract, frames

COMMAND = "HVDTRAIN_RUN"


def main() -> int:
    """Returns the exit status, as ssh does."""
    host, command = sys.argv[1], os.environ.pop(COMMAND)
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    supervisor.connect("\0" + os.environ[contract.CHANNEL])
    supervisor.sendall(frames.pack_json(frames.RUN, {"host": host, "command": command}))
    reader = frames.FrameReader()
    while data := supervisor.recv(65536):
        for kind, payload in reader.feed(data):
            if kind == frames.HERE:
                os.execv("/bin/sh", ["/bin/sh", "-c", command])  # noqa: S606 - it is what horovodrun wants run here
            elif kind == frames.OUT:
                sys.stdout.buffer.write(payload)
                sys.stdout.buffer.flush()
            elif kind == frames.EXIT:
                code = int(json.loads(payload)["code"])
                return code if code >= 0 else 128 - code
    return 255


if __name__ == "__main__":
    sys.exit(main())
