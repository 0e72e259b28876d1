"""Gets Horovod's source package, by pip with its hash checked, or from a file for machines without a network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from hvdtrain.errors import StartError

VERSION = "0.28.1"
# Of horovod-0.28.1.tar.gz, as PyPI publishes it.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def download(folder: Path) -> Path:
    """The source package, by pip with the user's own configuration.

    Raises:
        StartError: no index that pip knows has it, or its hash is another.
    """
    requirement = folder / "requirements.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
        "--no-binary", ":all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirement),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    packages = list(folder.glob("horovod-*.tar.gz"))
    if done.returncode != 0 or not packages:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-3:]
        raise StartError(
            f"pip can't download Horovod {VERSION}: {' '.join(lines)}",
            fix="check the network and pip's index, or give its source package with --sdist FILE",
        )
    return packages[0]


def check_hash(package: Path) -> None:
    """Refuse a file that isn't the published source package.

    Raises:
        StartError: it can't be read, or its hash is another.
    """
    try:
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"can't read the source package: {error.strerror}", where=str(package)) from error
    if digest != SHA256:
        raise StartError(
            f"this isn't Horovod {VERSION}'s source package: its SHA-256 is {digest}, not {SHA256}",
            where=str(package),
            fix=f"download horovod-{VERSION}.tar.gz again",
        )


def unpack(package: Path, folder: Path) -> Path:
    """Unpack the package. Returns the sources' folder."""
    with tarfile.open(package) as archive:
        # Its hash is known, and so is what is in it; the filter is Python 3.12's and newer patch releases'.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)  # noqa: S202
    return folder / f"horovod-{VERSION}"
