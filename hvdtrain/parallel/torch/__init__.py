"""Parallel layers, schedules and optimizers for PyTorch on Horovod."""
