"""What follows from another failure, or tells too little: it counts only where nothing else is found."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule

RULES = (
    Rule(
        "stalled-ranks",
        ("Missing ranks:", "Stalled ranks:"),
        r"(?:Missing|Stalled) ranks:\s*\n?(?P<stalled>(?P<missing>\d+)!?: \[[^\]\n]*\](?:\n\d+!?: \[[^\]\n]*\])*)",
        "ranks didn't take part in collectives that the others wait in (rank: tensors): {stalled}",
        "let all ranks call the same collectives in the same order (no collective under `if hvd.rank() == 0`, the same "
        "number of batches on each); if a rank only needs longer, raise HOROVOD_STALL_CHECK_TIME_SECONDS",
        "hang",
    ),
    Rule(
        "stalled-tensors",
        "missing ranks",
        r"^(?P<tensor>\S+) \[missing ranks: ?(?P<missing>[\d, ]+)\]",
        "ranks {missing} didn't take part in a collective that the others wait in: {tensor}",
        "let all ranks call the same collectives in the same order (no collective under `if hvd.rank() == 0`, the same "
        "number of batches on each)",
        "hang",
    ),
    Rule(
        "gloo-rendezvous",
        "Wait timeout after",
        r"Wait timeout after (?P<seconds>\d+) seconds for key\(s\): (?P<key>[^.\s]+)",
        "a rank didn't come to the start within {seconds} s: it started late, or can't reach the launcher's host",
        "horovodrun --gloo-timeout-seconds 120 for slow starts; otherwise the network interface and the firewall "
        "between "
        "the hosts",
        "setup",
    ),
    Rule(
        "gloo-timeout",
        ("Timed out waiting", "Connect timeout", "connectFullMesh"),
        r"Timed out waiting (?P<ms>\d+)ms for \w+ operation to complete|Connect timeout \[(?P<peer>[^\]]+)\]|"
        r"connectFullMesh failed",
        "a rank had no answer from another one: it is slow or hangs, or the chosen network doesn't connect the hosts",
        "network.interfaces (HOROVOD_GLOO_IFACE) must name a network that connects all hosts, not docker0 or lo; "
        "horovodrun --gloo-timeout-seconds 300 if one rank's first step takes long",
        "hang",
    ),
    Rule(
        "nccl-socket",
        "NCCL WARN",
        r"NCCL WARN [^\n]*(?:connect to (?P<peer>\S+)[^\n]*failed|Call to (?:connect|bind) (?:to \S+ )?failed|"
        r"socketStartConnect)[^\n]*"
        r"(?:refused|timed out|No route|unreachable)[^\n]*",
        "NCCL can't connect two hosts over the interface that it chose",
        "NCCL_SOCKET_IFNAME to the network that connects all hosts (not docker0 or lo); open the firewall between them",
    ),
    Rule(
        "nccl-system-error",
        "unhandled system error",
        r"unhandled system error",
        "a system call of NCCL failed: the network, shared memory or a limit of the host",
        "NCCL_DEBUG=INFO (env.set in the job) prints the reason in a line with 'NCCL WARN'",
    ),
    Rule(
        "nccl-cuda-error",
        "unhandled cuda error",
        r"unhandled cuda error",
        "a CUDA call of NCCL failed: the driver is too old, a GPU is faulty, or its memory is full",
        "NCCL_DEBUG=INFO (env.set in the job) prints the reason in a line with 'NCCL WARN'; nvidia-smi on that host",
    ),
    Rule(
        "nccl-usage",
        ("nvalid usage", "ncclInvalidUsage"),
        r"nccl\w* failed: invalid usage|ncclInvalidUsage",
        "NCCL was used in a way that it doesn't allow: mostly two ranks on one GPU, or different versions on the hosts",
        "NCCL_DEBUG=INFO (env.set in the job) prints the reason in a line with 'NCCL WARN'",
    ),
    Rule(
        "daemon-not-started",
        ("unable to reliably start", "ORTE has lost communication", "PRTE"),
        r"ORTE was unable to reliably start one or more daemons|ORTE has lost communication with a remote daemon"
        r"(?:[\s\S]{0,200}?Node name: +(?P<host>\S+))?",
        "mpirun's helper didn't start, or was lost, on a host: no login, no Open MPI there, or no way back through the "
        "network",
        "ssh HOST orted --version must work without a question, from every host to every other",
        "lost_host",
    ),
    Rule(
        "killed",
        ("signal 9", "status code 137", "Killed"),
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal 9|"
        r"Process (?P<number>\d+) exit with status code 137",
        "{who} was killed by SIGKILL and nothing says by whom: mostly the kernel, when memory runs out",
        "dmesg -T | grep -i 'killed process' on its host; in a container look at its memory limit",
        "signal",
    ),
    Rule(
        "terminated",
        "exited on signal",
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+) "
        r"\((?P<name>[^)]+)\)",
        "rank {rank} on {host} was ended by signal {signal} ({name})",
        "the lines of that rank before it, and dmesg on its host, may say why",
        "signal",
    ),
    Rule(
        "peer-lost",
        ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Socket closed"),
        r"gloo[\s\S]*(?:Connection reset by peer|Connection closed by peer|Broken pipe)|"
        r"Read (?:error|-1)[^\n]*Connection reset by peer",
        "another rank ended, or its host was lost, in the middle of a collective, and its output says nothing of why",
        "look at that rank's host: dmesg -T, free memory, network",
        "lost_host",
    ),
    Rule(
        "shut-down",
        "Horovod has been shut down",
        r"Horovod has been shut down",
        "one rank ended, or called hvd.shutdown(), while others still had collectives to do, without saying why",
        "all ranks must run the same number of steps: the same number of batches on each, and a barrier before the end",
    ),
)
