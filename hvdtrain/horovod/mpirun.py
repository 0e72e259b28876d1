"""What stands for mpirun: gives the real one hvdtrain's parameters in place of horovodrun's, and becomes it.

horovodrun names the transport and the interfaces itself, and Open MPI 4 refuses a parameter that is given twice. With
its ``btl ^openib`` it also brings back what the system's own configuration leaves out.
"""

from __future__ import annotations

import json
import os
import sys

PROGRAM = "HVDTRAIN_MPIRUN"
PARAMETERS = "HVDTRAIN_MPI_PARAMETERS"
# Where the workers' command begins: with `PYTHON -m`, then this.
_WORKER = "hvdtrain.worker"
# horovodrun's own choice of transport and interfaces.
_CHOSEN_BY_HOROVODRUN = {"pml", "btl", "btl_tcp_if_include", "btl_tcp_if_exclude"}


def rewritten(arguments: list[str], parameters: dict[str, str]) -> list[str]:
    """Mpirun's arguments as horovodrun gives them, with these MCA parameters in the place of its own."""
    workers = _WORKER in arguments
    end = arguments.index(_WORKER) - 2 if workers else len(arguments)
    dropped = {*parameters, *_CHOSEN_BY_HOROVODRUN}
    kept = [word for name, value in parameters.items() for word in ("-mca", name, value)]
    words = iter(arguments[:end])
    for word in words:
        if word == "-mca":
            name, value = next(words), next(words)
            if name not in dropped:
                kept += [word, name, value]
        elif word == "-x":
            variable = next(words)
            # Interfaces differ from host to host, and reach each worker over its channel.
            if not variable.startswith(("NCCL_SOCKET_IFNAME=", PROGRAM, PARAMETERS)):
                kept += [word, variable]
        elif not workers or word != "--tag-output":
            # Workers' output comes over their channels, so nobody needs its lines tagged.
            kept.append(word)
    return kept + arguments[end:]


def main() -> None:
    """Become mpirun."""
    parameters, program = json.loads(os.environ.pop(PARAMETERS)), os.environ.pop(PROGRAM)
    # horovodrun asks for its version first.
    arguments = rewritten(sys.argv[1:], parameters) if "-mca" in sys.argv else sys.argv[1:]
    os.execv(program, [program, *arguments])  # noqa: S606 - argv, no shell


if __name__ == "__main__":
    main()
