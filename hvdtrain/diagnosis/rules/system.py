"""The host: memory, disks, files, ports, permissions, crashes."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule

RULES = (
    Rule(
        "shared-memory",
        ("Bus error", "shared memory"),
        r"DataLoader worker \(pid\(?s?\)? [^)]*\)+ (?:is killed by signal: Bus error|exited unexpectedly)[^\n]*|"
        r"insufficient shared memory \(shm\)|unable to allocate shared memory\(shm\)|unable to (?:open|write to|"
        r"resize|mmap) (?:shared memory|file) [^\n]*(?:torch_|shm)[^\n]*|"
        r"Error while creating shared memory segment (?P<segment>\S+) \(size \d+\)",
        "shared memory (/dev/shm) is too small on this host",
        "enlarge it (docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium Memory at "
        "/dev/shm), or "
        "use fewer DataLoader workers",
    ),
    Rule(
        "mpi-shared-memory",
        "not enough space for",
        r"It appears as if there is not enough space for (?P<path>\S+) \(the shared-memory backing",
        "Open MPI has no room for its shared memory file",
        "enlarge /dev/shm, or free the folder that TMPDIR names (orte_tmpdir_base)",
        "setup",
    ),
    Rule(
        "gpu-memory",
        (
            "CUDA out of memory",
            "OutOfMemoryError",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "OOM when allocating",
            "CUDNN_STATUS_ALLOC_FAILED",
        ),
        r"CUDA out of memory\.(?: Tried to allocate (?P<size>[\d.]+ [KMGT]iB))?[^\n]*|CUDA_ERROR_OUT_OF_MEMORY|"
        r"OOM when allocating tensor with shape ?(?P<shape>\[[\d,]*\])|CUDNN_STATUS_ALLOC_FAILED|"
        r"CUDA error: out of memory",
        "the memory of the GPU of {who} ran out",
        "smaller batches (options.batch_size), gradient accumulation or mixed precision; nvidia-smi shows whether "
        "another process holds the GPU, and each rank must use its own (hvd.local_rank())",
        "oom",
    ),
    Rule(
        "host-memory-kernel",
        ("Out of memory: Kill", "oom-kill", "Memory cgroup out of memory", "oom_reaper"),
        r"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (?P<pid>\d+) \((?P<program>[^)]+)\)|"
        r"oom-kill",
        "the kernel killed the process because the memory of the host or of its container ran out",
        "fewer ranks or DataLoader workers per host, smaller batches or a larger memory limit",
        "oom",
    ),
    Rule(
        "host-memory",
        ("MemoryError", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "Unable to allocate"),
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes|"
        r"Unable to allocate (?P<size>[\d.]+ \w+) for an array|^MemoryError\b|std::bad_alloc|"
        r"OSError: \[Errno 12\] Cannot allocate memory",
        "{who} could not get the memory that it asked for",
        "smaller batches or arrays, fewer ranks or DataLoader workers per host; ulimit -v and the container's limit "
        "may "
        "be lower than the host's memory",
        "oom",
    ),
    Rule(
        "disk-full",
        ("No space left on device", "PytorchStreamWriter failed", "Disk quota exceeded", "unexpected pos"),
        r"(?:\[Errno 28\] )?No space left on device(?:: '(?P<path>[^']+)')?|\[Errno 122\] Disk quota exceeded|"
        r"PytorchStreamWriter failed writing file|unexpected pos \d+ vs \d+",
        "a disk (or a quota) that {who} writes to is full",
        "free some space there, or write to another folder (df -h, df -i, quota); checkpoint.keep bounds checkpoints",
    ),
    Rule(
        "open-files",
        "Too many open files",
        r"Too many open files",
        "{who} has more files and sockets open than its limit allows",
        "ulimit -n 65536 before the launch (or LimitNOFILE, limits.conf); with DataLoader workers "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    Rule(
        "threads",
        ("can't start new thread", "Resource temporarily unavailable"),
        r"can't start new thread|pthread_create[^\n]*Resource temporarily unavailable|"
        r"fork: (?:retry: )?Resource temporarily unavailable",
        "{who} may not start more threads or processes",
        "ulimit -u, or the container's pids limit, must be larger; fewer DataLoader workers and OMP_NUM_THREADS "
        "threads "
        "help too",
    ),
    Rule(
        "port-in-use",
        ("Address already in use", "EADDRINUSE"),
        r"(?:port: (?P<port>\d+)[^\n]*EADDRINUSE|EADDRINUSE[^\n]*?port:? ?(?P<port2>\d+)|Address already in use)",
        "a network port that {who} wants is in use: by another job, an earlier run's process, or another rank",
        "choose a free port (0 lets the system choose), one per rank; ss -ltnp shows who holds it",
    ),
    Rule(
        "illegal-instruction",
        ("Illegal instruction", "SIGILL"),
        r"Illegal instruction|SIGILL|Signal: Illegal",
        "{who} met an instruction that its CPU doesn't have: a library was built for a newer CPU",
        "install generic builds, or build on the oldest CPU among the hosts (without -march=native)",
        "signal",
    ),
    Rule(
        "segmentation-fault",
        ("Segmentation fault", "SIGSEGV"),
        r"Fatal Python error: Segmentation fault|Segmentation fault|SIGSEGV",
        "{who} crashed in compiled code (segmentation fault)",
        "the stack shows the Python line that called it; the usual reason is a package that was compiled against other "
        "versions: hvdtrain horovod check, then rebuild or reinstall that package",
        "signal",
    ),
    Rule(
        "bus-error",
        ("Bus error", "SIGBUS"),
        r"Fatal Python error: Bus error|Bus error|SIGBUS",
        "{who} crashed with a bus error: a file that it had mapped was cut short, or /dev/shm is full",
        "look at df -h /dev/shm and at the data files; in a container enlarge --shm-size",
        "signal",
    ),
    Rule(
        "permission",
        "Permission denied",
        r"PermissionError: \[Errno 13\] Permission denied(?:: '(?P<path>[^']+)')?",
        "{who} may not open {path}",
        "give that user the right to it (ls -l, id), or use another folder",
    ),
    Rule(
        "read-only",
        "Read-only file system",
        r"\[Errno 30\] Read-only file system(?:: '(?P<path>[^']+)')?",
        "{path} lies on a file system that is read-only for {who}",
        "write to another folder, or mount it writable; a disk with errors is made read-only by the kernel (dmesg)",
    ),
    Rule(
        "stale-file",
        "Stale file handle",
        r"Stale (?:NFS )?file handle(?:: '(?P<path>[^']+)')?",
        "a file on a network file system was replaced or removed while {who} used it",
        "don't change the code or the data folder while a job runs; mount it again on that host if it stays",
    ),
    Rule(
        "file-missing",
        "No such file or directory",
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'",
        "{path} doesn't exist where {who} runs",
        "give an absolute path that exists on every host (a shared folder, or a copy)",
    ),
    Rule(
        "loader-worker",
        "DataLoader worker",
        r"Caught (?P<kind>\w+) in DataLoader worker process (?P<number>\d+)\.",
        "the data set raised {kind} in a DataLoader worker; its own traceback stands below the 'Caught' line",
        "num_workers=0 shows it without the detour",
    ),
)
