"""A profile as a typed model; its descriptions make the table of docs/cluster-profiles.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict

from hvdtrain.cluster.profiles.quantities import Count, Memory, Rate, Space, Speed, Time, Version
from hvdtrain.spec.fields import CHOICE, Boolean, OptionalText, Text
from hvdtrain.spec.models import Section as SpecSection


class Section(SpecSection):
    """A mapping of a profile; what isn't written is not expected."""

    model_config = ConfigDict(arbitrary_types_allowed=True)


class Cpu(Section):
    """Processors of each host."""

    models: tuple[Text, ...] = ()
    """One of these; their words must be in the model's name: `Xeon Platinum 8380`, `EPYC 7763`."""

    sockets: Count = None
    """Processors."""

    cores: Count = None
    """Cores of all of them."""

    threads: Count = None
    """Hardware threads of all of them."""

    governor: OptionalText = None
    """Frequency governor of every thread, such as `performance`. A kernel that scales no frequency passes."""

    numa_balancing: Boolean | None = None
    """Whether the kernel moves memory between NUMA nodes by itself."""


class MemoryOfHost(Section):
    """Memory of each host."""

    total: Memory = None
    """All of it. GB and GiB both mean 2^30 bytes here, and 6% may be missing: firmware and kernel keep some."""

    ecc: Boolean | None = None
    """Whether the kernel counts its errors, as it does for ECC memory."""


class Storage(Section):
    """Disks of each host."""

    nvme: Space = None
    """All NVMe disks together."""

    free: Space = None
    """Free space in the working directory (`--directory`, or the job's)."""


class Gpu(Section):
    """GPUs of each host."""

    models: tuple[Text, ...] = ()
    """One of these, for every GPU: `A100`, `H100 80GB`."""

    count: Count = None
    """How many."""

    memory: Memory = None
    """Of each. As with `memory.total`, GB means 2^30 bytes and 6% may be missing."""

    ecc: Boolean | None = None
    """Whether ECC is on, on every one."""

    driver: Version = None
    """NVIDIA's driver."""


class Fabric(Section):
    """RDMA adapters of each host."""

    kinds: tuple[Annotated[Literal["infiniband", "roce"], CHOICE], ...] = ()
    """One of these, for every port that is up."""

    adapters: Count = None
    """How many have a port that is up."""

    rate: Rate = None
    """Of each port that is up."""


class Limits(Section):
    """What a login on each host may use."""

    open_files: Count = None
    """Files that a process may open."""

    locked_memory: Annotated[Literal["unlimited"] | None, CHOICE] = None
    """Memory that a process may pin, as RDMA needs it: `unlimited`."""


class Software(Section):
    """What is installed on each host, for the job's Python."""

    python: Version = None
    """The job's Python."""

    torch: Version = None
    """PyTorch."""

    tensorflow: Version = None
    """TensorFlow."""

    horovod: Version = None
    """Horovod."""

    frameworks: tuple[Annotated[Literal["torch", "tensorflow"], CHOICE], ...] = ()
    """Frameworks that Horovod is built for: all of these."""

    controllers: tuple[Annotated[Literal["gloo", "mpi"], CHOICE], ...] = ()
    """What Horovod can be started with: all of these."""

    nccl: Boolean | None = None
    """Whether Horovod is built with NCCL."""

    mpi: Version = None
    """`mpirun`."""

    cuda: Version = None
    """The newest CUDA that the driver has."""


class MeasuredSpeeds(Section):
    """What `--level standard` measures; at level quick they are skipped."""

    bandwidth: Rate = None
    """TCP payload between a host and others: the slower direction of its best."""

    latency: Time = None
    """TCP round trip of a byte: the median with others."""

    allreduce: Rate = None
    """Bus bandwidth of Horovod's allreduce over all hosts, at the largest size."""

    disk_write: Speed = None
    """In the working directory."""

    disk_read: Speed = None
    """In the working directory."""

    memory: Speed = None
    """Copies by all processors: bytes read plus bytes written."""


class Profile(Section):
    """What a cluster should be."""

    name: Text = ""
    """Shown in reports. Default: the file's name."""

    description: Text = ""
    """What it is for."""

    hosts: Count = None
    """How many hosts."""

    os: tuple[Text, ...] = ()
    """One of these: `Ubuntu 22.04`, `Rocky 8`."""

    kernel: Version = None
    """Linux."""

    clock: Time = None
    """How far a host's clock may be from this machine's."""

    cpu: Cpu = Cpu()
    memory: MemoryOfHost = MemoryOfHost()
    storage: Storage = Storage()
    gpu: Gpu = Gpu()
    fabric: Fabric = Fabric()
    limits: Limits = Limits()
    software: Software = Software()
    measured: MeasuredSpeeds = MeasuredSpeeds()
