"""What a host is and has, found in a fraction of a second with the standard library alone.

The sources are sent to the hosts, so they run on Python 3.8 too and import nothing else of hvdtrain's.
``facts`` is ``{section: {name: value}}``. A value that can't be read is None or its name is absent; a whole section
that failed is absent and named in ``errors``. Units are in the names.

``system`` (`system.collect`)
    hostname, fqdn: str. user: str, uid, gid: int, home: str.
    os_id, os_version, os_name: str, from os-release (``debian``, ``12``, ``Debian GNU/Linux 12 (bookworm)``).
    kernel, machine, boot_id: str. uptime_s: float.
    cpu_model: str. cpu_sockets, cpu_cores, cpu_threads: int, cpu_allowed: int, threads this user may run on.
    cpu_governors: list of str, each that some thread has, sorted; empty where the kernel scales no frequency.
    numa_nodes: int. numa_balancing: bool. transparent_hugepages: str, the mode chosen.
    load_1m, load_5m, load_15m: float.
    mem_total_bytes, mem_available_bytes, swap_total_bytes, swap_free_bytes: int.
    hugepages_total, hugepage_size_bytes: int.
    ecc_controllers: int, memory controllers that count errors; ecc_corrected, ecc_uncorrected: int, None without one.
    time_unix_s: float.
``limits`` (`limits.collect`)
    nofile_soft, nofile_hard (files), memlock_soft_bytes, memlock_hard_bytes, nproc_soft, nproc_hard (processes),
    core_soft_bytes, core_hard_bytes: int, -1 for unlimited.
    cgroup_version: int, 1 or 2. cgroup_memory_limit_bytes: int, cgroup_cpu_limit: float (CPUs); None without a limit.
    shm_total_bytes, shm_free_bytes: int, None without /dev/shm.
``disks`` (`disks.collect`)
    paths: {path as asked: {exists, is_dir, readable, writable, executable: bool, real_path, mount_point, device,
    filesystem: str, read_only: bool, total_bytes, free_bytes, total_inodes, free_inodes: int (0 total: it counts none),
    write_error: str, None after a write that worked, absent if none was asked for}}. Only ``exists`` for a path that
    isn't there, with ``error`` (str) if that isn't the reason.
    nvme: list of {name, model: str, size_bytes: int}.
``software`` (`software.collect`)
    python_executable, python_version: str, of the Python that the probe runs in. python_asked: str or None;
    python_asked_executable: bool, None if none was asked for; python_asked_is_running: bool.
    packages: {name in lower case with dashes: version} of those among `software.PACKAGES` (and ``nvidia-nccl-cu*``).
    torch_cuda, tensorflow_cuda: str, None for a build without.
    horovod: None, or {version: str, frameworks: {name: version it was compiled against or None}, controllers: list of
    ``gloo``, ``mpi``, nccl: bool, record: dict or None, hvdtrain's own record of the build}.
    hvdtrain_version: str or None. hvdtrain_sha256: str, over its sources' names and contents; None if not installed.
    mpirun, mpirun_version: str (path; such as ``Open MPI 4.1.4``). cuda_driver_version: str.
    horovodrun, ssh, ib_write_bw, dcgmi, nvidia_smi: str, the path or None.
    files: {path as asked: {exists: bool, size_bytes: int, sha256: str}}.
``gpus`` (`gpus.collect`)
    count: int, 0 without any. driver_version: str. error: str, why the driver could not be asked; None if it could.
    gpus: list of {index: int, model, uuid, driver_version, pci_bus_id: str, memory_total_bytes, memory_used_bytes: int,
    ecc_enabled: bool, ecc_corrected, ecc_uncorrected: int (since the driver was loaded), temperature_celsius: float,
    utilization_percent, power_watts, power_limit_watts: float, clock_sm_mhz, clock_sm_max_mhz: float,
    pcie_generation, pcie_generation_max, pcie_width, pcie_width_max: int, persistence: bool, mig_enabled: bool,
    throttle_reasons: list of ``hw_slowdown``, ``hw_thermal_slowdown``, ``hw_power_brake_slowdown``,
    ``sw_thermal_slowdown``, ``sw_power_cap``}; None where the GPU doesn't tell.
    processes: list of {gpu_uuid: str, pid: int, memory_used_bytes: int, user, command: str}.
    xids: list of {pci_bus_id: str, xid: int, text: str}, oldest first, at most 100; None if the kernel
    log can't be read.
``network`` and ``infiniband``: see `network` and `infiniband`.
"""
