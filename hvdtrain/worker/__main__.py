"""``python -m hvdtrain.worker COMMAND…``: what horovodrun starts for each rank."""

from __future__ import annotations

import os
import sys

from hvdtrain import contract


def main() -> None:
    """Run the command under the supervisor, or by itself where the command of ``--dry-run`` was pasted."""
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: python -m hvdtrain.worker COMMAND [ARGUMENT...]")
    name = os.environ.get(contract.CHANNEL)
    if name is None:
        try:
            os.execvp(command[0], command)  # noqa: S606 - this is what a worker is for
        except OSError as error:
            sys.exit(f"{command[0]}: {error.strerror}")
    from hvdtrain.worker.wrapper import Wrapper

    sys.exit(Wrapper.connect(name).run(command))


if __name__ == "__main__":
    main()
