"""Nothing of a build or a proof outlives hvdtrain, whichever way that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from real_processes import heed_interrupts, is_running, wait_until_gone

from hvdtrain.horovod.guard import guarded

# A process in a session of its own, below a shell that waits: neither a group's nor a parent's signal reaches it.
FAMILY = "setsid sleep 600 & echo $!; wait"
LIMIT_S = 60


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 128 + 9), ("kill -15 $$", 128 + 15)]
)
def test_the_exit_status_is_the_commands(script: str, status: int) -> None:
    with guarded(["sh", "-c", script], os.environ) as process:
        assert process.wait(LIMIT_S) == status


def test_output_and_errors_come_in_one_pipe() -> None:
    with guarded(["sh", "-c", 'echo "$X"; echo b >&2'], {**os.environ, "X": "a"}) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == "a\nb\n"


def test_a_command_that_ends_leaves_nothing() -> None:
    with guarded(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], os.environ) as process:
        assert process.stdout
        left = int(process.stdout.readline())
        assert process.wait(LIMIT_S) == 0
        assert not is_running(left)


def test_leaving_the_context_ends_all_of_it() -> None:
    with guarded(["sh", "-c", FAMILY], os.environ) as process:
        assert process.stdout
        left = int(process.stdout.readline())
        assert is_running(left)
    assert not is_running(left)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_hvdtrain_is_the_end_of_all(number: signal.Signals) -> None:
    code = f"""if True:
        import os
        from hvdtrain.horovod.guard import guarded
        with guarded(["sh", "-c", {FAMILY!r}], os.environ) as process:
            print(process.stdout.readline(), end="", flush=True)
            process.wait()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert parent.stdout
    with parent.stdout:
        left = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(LIMIT_S)
    wait_until_gone([left], LIMIT_S)
