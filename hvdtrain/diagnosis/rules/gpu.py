"""GPUs: driver, CUDA, NCCL."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule

RULES = (
    Rule(
        "same-gpu",
        "Duplicate GPU detected",
        r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<two>\d+) both on CUDA device (?P<device>\w+)",
        "ranks {one} and {two} use the same GPU ({device})",
        "torch.cuda.set_device(hvd.local_rank()) (TensorFlow: set_visible_devices) before the first use of CUDA; or "
        "more "
        "slots in the hostfile than the host has GPUs",
    ),
    Rule(
        "gpu-ordinal",
        "invalid device ordinal",
        r"invalid device ordinal",
        "{who} wants a GPU that its host doesn't have",
        "slots in the hostfile must not exceed the host's GPUs (nvidia-smi -L); CUDA_VISIBLE_DEVICES may hide some",
    ),
    Rule(
        "driver-too-old",
        (
            "driver version is insufficient",
            "NVIDIA driver on your system is too old",
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        ),
        r"CUDA driver version is insufficient for CUDA runtime version|"
        r"^(?![^\n]*UserWarning)[^\n]*NVIDIA driver on your system is too old "
        r"\(found version (?P<version>\d+)\)",
        "the NVIDIA driver on the host of {who} is older than the CUDA version of the framework needs",
        "update the driver on that host, or install the framework for an older CUDA (nvidia-smi shows which the driver "
        "supports)",
        "setup",
    ),
    Rule(
        "driver-mismatch",
        ("Driver/library version mismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "driver is a stub library"),
        r"Driver/library version mismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|CUDA driver is a stub library",
        "the NVIDIA driver's library and the loaded kernel module are of different versions",
        "reboot the host, or reload the module; keep CUDA's stubs folder out of LD_LIBRARY_PATH",
        "setup",
    ),
    Rule(
        "gpu-too-new-or-old",
        ("no kernel image is available", "cudaErrorNoKernelImageForDevice"),
        r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
        "a library wasn't compiled for this GPU's generation",
        "install a build of the framework that knows the GPU (nvidia-smi --query-gpu=compute_cap); Horovod: "
        "HOROVOD_BUILD_CUDA_CC_LIST=80,90 hvdtrain horovod build --rebuild",
        "setup",
    ),
    Rule(
        "no-gpu",
        ("Found no NVIDIA driver", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device", "No CUDA GPUs are available"),
        r"Found no NVIDIA driver on your system|CUDA error: no CUDA-capable device is detected|No CUDA GPUs are "
        r"available",
        "no GPU is visible to {who}: no driver, no device in the container, or an empty CUDA_VISIBLE_DEVICES",
        "nvidia-smi on that host; docker run --gpus all; look at CUDA_VISIBLE_DEVICES",
        "setup",
    ),
    Rule(
        "cpu-build",
        ("Torch not compiled with CUDA enabled", "_cuda_"),
        r"Torch not compiled with CUDA enabled|module 'torch\._C' has no attribute '_cuda_\w+'",
        "the installed PyTorch is a CPU build, and the program uses CUDA",
        "install PyTorch's CUDA build on every host, then hvdtrain horovod build --rebuild",
        "setup",
    ),
    Rule(
        "gpu-fault",
        ("Xid", "uncorrectable ECC", "ECC error", "fallen off the bus", "GPU is lost"),
        r"NVRM: Xid \((?P<device>[^)]*)\): (?P<xid>\d+)|uncorrectable (?:NVLink |ECC )?error[^\n]*|[Uu]ncorrectable "
        r"ECC|"
        r"fallen off the bus|GPU is lost",
        "a GPU on the host of {who} is faulty (memory error, or lost from the bus)",
        "leave that host out (--exclude), then nvidia-smi -q -d ECC and dmesg | grep Xid there; reset or replace the "
        "GPU",
    ),
    Rule(
        "peer-access",
        ("peer access", "NCCL WARN"),
        r"peer access is not supported between these two devices|"
        r"NCCL WARN [^\n]*(?:peer access|[Nn][Vv][Ll]ink|NVLS)[^\n]*",
        "GPUs of one host can't use their direct link (peer-to-peer, NVLink)",
        "nvidia-smi topo -m and nvidia-smi nvlink -s; systemctl status nvidia-fabricmanager on NVSwitch machines; "
        "NCCL_P2P_DISABLE=1 (or NCCL_NVLS_ENABLE=0) goes round it",
    ),
    Rule(
        "fabric-manager",
        ("system not yet initialized", "CUDA_ERROR_SYSTEM_NOT_READY"),
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        "the NVSwitch fabric isn't up: the fabric manager doesn't run, or is of another version than the driver",
        "systemctl restart nvidia-fabricmanager on that host, in the driver's version",
        "setup",
    ),
    Rule(
        "nccl-versions",
        ("NCCL version", "mismatch", "socketFinalizeAccept: wrong"),
        r"(?:NCCL version mismatch|Mismatched NCCL version|mismatched versions? of NCCL|socket\w*Accept: wrong "
        r"(?:type|magic))[^\n]*",
        "the hosts run different versions of NCCL",
        "install the same NCCL (the same image, the same framework build) on every host",
        "setup",
    ),
    Rule(
        "nccl-shared-memory",
        "NCCL WARN",
        r"NCCL WARN (?:Error|Call to \w+) ?(?:while )?(?:creating|attaching|posix_fallocate|ftruncate|"
        r"open)[^\n]*(?:shared memory|/dev/shm|nccl-)[^\n]*",
        "NCCL has no room for its shared memory in /dev/shm",
        "docker run --shm-size=8g (or --ipc=host); NCCL_SHM_DISABLE=1 goes round it",
    ),
    Rule(
        "cuda-assert",
        "device-side assert triggered",
        r"device-side assert triggered",
        "a kernel on the GPU found a wrong value: mostly a label or an index beyond the number of classes or rows",
        "CUDA_LAUNCH_BLOCKING=1 names the operation; check labels and embedding indices on the CPU",
    ),
    Rule(
        "cuda-memory-access",
        "illegal memory access",
        r"an illegal memory access was encountered",
        "a kernel on the GPU read or wrote where it may not",
        "CUDA_LAUNCH_BLOCKING=1 names the operation, compute-sanitizer the place; on one host only: suspect its GPU",
    ),
)
