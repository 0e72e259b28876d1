"""Training tasks on Horovod: protocol, loop, sharding, schedule, checkpoints."""
