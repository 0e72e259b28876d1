"""Parallel layers for Keras 3 on Horovod."""
