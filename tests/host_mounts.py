"""Mounts made inside another process's mount namespace: `host_mounts.py PID bind|cover|detach ARGUMENTS`.

A program of its own, since a process can only enter a mount namespace for good. It is loaded before it enters, so it
works whatever is hidden in there.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MNT_DETACH = 0x1000, 0x4000, 2
libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    done = libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())
    checked(done, f"mount {source} at {target}")


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)


def detach(target: str) -> None:
    checked(libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def cover(folder: str, options: str, without: str, fill: str) -> None:
    """A tmpfs over the folder in which everything but the name `without` stands as before.

    `fill` is what to use up: "bytes", "inodes", or nothing.
    """
    below = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    state = os.fstat(below)
    entries = list(os.scandir(folder))
    mount(
        "tmpfs",
        folder,
        "tmpfs",
        options=f"mode={state.st_mode & 0o7777:o},uid={state.st_uid},gid={state.st_gid},{options}",
    )
    for entry in entries:
        source, target = f"/proc/self/fd/{below}/{entry.name}", Path(folder, entry.name)
        if entry.name == without:
            continue
        if entry.is_symlink():
            target.symlink_to(Path(source).readlink())
        else:
            target.mkdir() if entry.is_dir() else target.touch()
            bind(source, str(target))
    if fill:
        use_up(Path(folder), fill)


def use_up(folder: Path, what: str) -> None:
    number = 0
    try:
        while True:
            with (folder / f".used-{what}-{number}").open("wb", buffering=0) as file:
                while what == "bytes":
                    file.write(bytes(4096))
            number += 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def main(pid: str, action: str, *arguments: str) -> None:
    entered = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    checked(libc.setns(entered, CLONE_NEWNS), f"enter the mounts of process {pid}")
    actions: dict[str, Callable[..., None]] = {"bind": bind, "cover": cover, "detach": detach}
    actions[action](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
