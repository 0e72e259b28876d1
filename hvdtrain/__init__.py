"""Launch distributed training with Horovod from a YAML job file and a list of hosts."""

__version__ = "0.1.0"
