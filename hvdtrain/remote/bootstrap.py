"""Running the probe on a host where nothing is installed: its sources go over standard input and stay in memory."""

from __future__ import annotations

import json
import marshal
import shlex
import zlib
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import hvdtrain

# Exit statuses of the remote command, of none that a shell or ssh gives.
NO_PYTHON = 97
OLD_PYTHON = 98
_INTERPRETERS = ("python3", "/usr/bin/python3", "/usr/libexec/platform-python")
# Free of quotes, so that it passes through two shells as it is.
_FIRST = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_SECOND = f"""
import sys
if sys.version_info < (3, 8):
    sys.stderr.write("hvdtrain: %s is Python %s; 3.8 or newer is needed\\n" % (sys.executable, sys.version.split()[0]))
    sys.exit({OLD_PYTHON})
import importlib.machinery, importlib._bootstrap_external as external, json, marshal, zlib
class Sources:
    def __init__(self, sources, compiled):
        self.sources, self.compiled = sources, compiled
    def find_spec(self, name, path=None, target=None):
        if name in self.sources:
            package = any(other.startswith(name + ".") for other in self.sources)
            return importlib.machinery.ModuleSpec(name, self, origin=name, is_package=package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        code = marshal.loads(self.compiled[name]) if self.compiled else None
        exec(code or compile(self.sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)
stream = sys.stdin.buffer
piece = lambda: stream.read(int(stream.readline()))
sources, magic, compiled = json.loads(zlib.decompress(piece()).decode()), piece(), piece()
same = magic == external.MAGIC_NUMBER
sys.meta_path.insert(0, Sources(sources, marshal.loads(zlib.decompress(compiled)) if same else None))
from hvdtrain.probe.main import main
main()
""".encode()


def probe_command(python: str | None = None) -> str:
    """The command line that starts the probe on a host, whatever the login shell there is.

    It takes the wanted Python if there is one that can run, or else the first of the usual ones. Module ``site`` is
    left out: it takes half of an interpreter's start, and the probe finds packages without it.
    """
    candidates = " ".join(shlex.quote(candidate) for candidate in ([python] if python else []) + [*_INTERPRETERS])
    script = (
        f"for p in {candidates}; do"
        f' if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "{_FIRST}"; fi; done;'
        f' echo "hvdtrain: there is no python3 on this host" >&2; exit {NO_PYTHON}'
    )
    return f"exec sh -c {shlex.quote(script)}"


@cache
def probe_sources() -> bytes:
    """What the command reads before the first request: each module's source, and its code for this very Python.

    A host with the same Python, as a job's hosts have, needn't compile it.
    """
    package = Path(hvdtrain.__file__).parent
    sources = {"hvdtrain": ""}
    for path in sorted((package / "probe").glob("*.py")):
        name = "hvdtrain.probe" if path.stem == "__init__" else f"hvdtrain.probe.{path.stem}"
        sources[name] = path.read_text(encoding="utf-8")
    compiled = {
        name: marshal.dumps(compile(source, name.replace(".", "/") + ".py", "exec")) for name, source in sources.items()
    }
    packed = [zlib.compress(json.dumps(sources).encode(), 9), MAGIC_NUMBER, zlib.compress(marshal.dumps(compiled), 9)]
    return b"".join(b"%d\n%s" % (len(piece), piece) for piece in (_SECOND, *packed))
