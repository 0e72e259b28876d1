"""What a host told, less what has another type than the probe's: checks needn't doubt what they read."""

from __future__ import annotations

from typing import Any

# A shape is a type, [shape] for a list, {name: shape} for an object, {EACH: shape} for one with any names.
EACH = "*"
_PATH = {
    "exists": bool,
    "is_dir": bool,
    "readable": bool,
    "executable": bool,
    "mount_point": str,
    "free_bytes": int,
    "total_inodes": int,
    "free_inodes": int,
}
_GPU = {
    "index": int,
    "model": str,
    "memory_total_bytes": int,
    "ecc_enabled": bool,
    "ecc_uncorrected": int,
    "throttle_reasons": [str],
}
_PORT = {"port": int, "link_layer": str, "rate": str, "state": str, "counters": {EACH: int}}
# Of the probe's facts (`hvdtrain.probe`), those that are checked.
SHAPES: dict[str, Any] = {
    "system": {
        **dict.fromkeys(("hostname", "user", "os_id", "os_version", "os_name", "kernel", "cpu_model"), str),
        **dict.fromkeys(("uid", "cpu_sockets", "cpu_cores", "cpu_threads", "numa_nodes"), int),
        **dict.fromkeys(("mem_total_bytes", "mem_available_bytes", "ecc_controllers", "ecc_uncorrected"), int),
        "cpu_governors": [str],
        "numa_balancing": bool,
        "load_1m": float,
    },
    "limits": dict.fromkeys(("nofile_soft", "memlock_soft_bytes", "cgroup_memory_limit_bytes"), int),
    "disks": {"paths": {EACH: _PATH}, "nvme": [{"name": str, "model": str, "size_bytes": int}]},
    "software": {
        **dict.fromkeys(("python_version", "mpirun_version", "cuda_driver_version"), str),
        **dict.fromkeys(("torch_cuda", "tensorflow_cuda", "hvdtrain_version", "hvdtrain_sha256"), str),
        "python_asked_executable": bool,
        "packages": {EACH: str},
        "files": {EACH: {"exists": bool, "size_bytes": int, "sha256": str}},
        "horovod": {"version": str, "frameworks": {EACH: str}, "controllers": [str], "nccl": bool},
    },
    "gpus": {
        "count": int,
        "driver_version": str,
        "error": str,
        "gpus": [_GPU],
        "processes": [{"pid": int, "user": str, "command": str}],
        "xids": [{"xid": int, "text": str}],
    },
    "infiniband": {"hcas": [{"name": str, "firmware": str, "ports": [_PORT]}]},
}


def sound(facts: Any, shape: Any = SHAPES) -> Any:
    """The facts without what hasn't its shape, as if it couldn't have been read; what has no shape here stays.

    A section or a list that isn't one is gone as a whole, an item that isn't one from its list.
    """
    if isinstance(shape, dict):
        if not isinstance(facts, dict):
            return None
        kept = {str(name): sound(value, shape.get(name, shape.get(EACH, object))) for name, value in facts.items()}
        return {name: value for name, value in kept.items() if value is not None or facts.get(name) is None}
    if isinstance(shape, list):
        if not isinstance(facts, list):
            return None
        return [kept for item in facts if (kept := sound(item, shape[0])) is not None]
    if shape is float and isinstance(facts, int) and not isinstance(facts, bool):
        return facts
    # True is an int to Python and no number to anybody else.
    fits = isinstance(facts, shape) and not (isinstance(facts, bool) and shape in (int, float))
    return facts if fits else None
