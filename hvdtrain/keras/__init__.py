"""Horovod for Keras 3 on TensorFlow: what `horovod.tensorflow.keras` was for Keras 2.

Use it as ``import hvdtrain.keras as hvd``. docs/keras.md has a whole script.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from horovod.tensorflow import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_object,
    cross_rank,
    cross_size,
    cuda_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allreduce,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from hvdtrain.keras import callbacks
from hvdtrain.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hvdtrain.keras.compression import Compression
from hvdtrain.keras.optimizer import DistributedOptimizer, load_model
from hvdtrain.keras.requirements import require_tensorflow_keras
from hvdtrain.keras.variables import broadcast_model, broadcast_variables

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "Max",
    "MetricAverageCallback",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

require_tensorflow_keras(keras.__version__, keras.backend.backend())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set is here."""
    allreduce(tf.zeros(()), op=Sum, name="hvdtrain.barrier", process_set=process_set).numpy()
