"""What launcher and workers agree on: names of environment variables and of files in the run directory.

Imported by both houses (see docs/architecture.md), so it imports nothing else. A worker must be able to load it
with the standard library alone.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

# --- environment of every worker -------------------------------------------------------------------------------
# Name of the supervisor's Unix socket in Linux's abstract namespace. Absent when the command of `--dry-run` was pasted
# into a shell.
CHANNEL = "HVDTRAIN_CHANNEL"
# Path of the page in which a rank writes what it is doing (`hvdtrain.heartbeat`).
HEARTBEAT = "HVDTRAIN_HEARTBEAT"
# Path of the file into which a rank writes its unhandled exceptions, and number of the signal at which it writes its
# stacks (`hvdtrain/worker/inject`).
REPORT = "HVDTRAIN_REPORT"
DUMP = "HVDTRAIN_DUMP_SIGNAL"
# Absolute path of the run directory.
RUN_DIRECTORY = "HVDTRAIN_RUN_DIRECTORY"
# Number of this start of the job, from 0.
ATTEMPT = "HVDTRAIN_ATTEMPT"
# Number of workers on this host, where Horovod doesn't know it: for it each worker of an elastic job is a host.
LOCAL_SIZE = "HVDTRAIN_LOCAL_SIZE"
# Horovod's own, which differ from host to host: the interface that Gloo takes, and where it finds horovodrun.
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
GLOO_RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
# Degrees of the grid of ranks, in the order of `hvdtrain.parallel.grid.AXES`, as `2,1,2,1`. Absent: data parallel.
GRID = "HVDTRAIN_GRID"
# A task job's `module:Class`, and its options and training settings as JSON objects.
TASK = "HVDTRAIN_TASK"
OPTIONS = "HVDTRAIN_OPTIONS"
SETTINGS = "HVDTRAIN_SETTINGS"

# --- run directory -------------------------------------------------------------------------------------------------
JOB_FILE = "job.yaml"
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
FAILURE_FILE = "failure.json"
METRICS_FILE = "metrics.jsonl"
# Horovod's log of the settings that its autotune tries, and what was best, where the spec names no file for it.
AUTOTUNE_LOG = "autotune.csv"
TUNED_FILE = "tuned.yaml"
LOGS = "logs"
# Lines of hvdtrain.tasks.collectives that hold a result begin so.
COLLECTIVE_MARK = "hvdtrain-collective "
LAUNCHER_LOG = "launcher.log"
# What a detached launch would show on the terminal.
LAUNCH_LOG = "launch.log"
CHECKPOINTS = "checkpoints"
ENVIRONMENT_FILE = "environment.json"
# Of an elastic job: the hosts of the moment as horovodrun wants them.
HOSTS_FILE = "elastic/hosts"
# The programs that stand first on horovodrun's PATH.
PROGRAMS = "bin"

# The signal that asks a rank for its stacks. A real-time one: SIGUSR1 and 2 are for users' programs and schedulers.
DUMP_SIGNAL = signal.SIGRTMIN + 7

# --- exit status of `hvdtrain.train` for a task or options that can't be used; the launcher ends with 2 -------------
BAD_TASK_STATUS = 72


def attempt_logs(attempt: int) -> str:
    """Folder of an attempt's logs, relative to the run directory."""
    return f"{LOGS}/attempt-{attempt}"


def rank_log(rank: int) -> str:
    """Name of a rank's log in its attempt's folder."""
    return f"rank-{rank:05d}.log"


def checkpoint_name(step: int) -> str:
    """Folder of a checkpoint in ``checkpoints/``; sorts by step."""
    return f"step-{step:010d}"


def rank_of(environment: Mapping[str, str]) -> int:
    """The rank that horovodrun or mpirun gave this process; 0 where nobody did."""
    names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 0)
