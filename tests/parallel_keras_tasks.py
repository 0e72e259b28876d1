"""The task of tests/test_parallel_keras_layouts.py, which grids of ranks train: 20 steps of 8 samples."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.train.keras import Options, Task

# In the last step one sample is left: all replicas but one have none.
SAMPLES, TABLES, WIDTH = 153, (23, 7), 8


class Everything(Task):
    """Layers that tensor groups share, and tables that embedding groups do."""

    options: Options

    def model(self) -> keras.Model:
        from hvdtrain.parallel.keras.embedding import ParallelEmbedding
        from hvdtrain.parallel.keras.tensor import ParallelAttention, ParallelMLP, VocabularyParallelEmbedding

        tensor = self.groups.tensor
        ids = keras.Input((len(TABLES),), dtype="int64")
        vectors = ParallelEmbedding(TABLES, WIDTH, self.groups.embedding)(ids)
        # 23 words: the last rank has fewer.
        vectors = vectors + VocabularyParallelEmbedding(max(TABLES), WIDTH, tensor)(ids)
        vectors = vectors + ParallelAttention(WIDTH, 4, tensor, causal=True)(vectors)
        vectors = vectors + ParallelMLP(WIDTH, 16, tensor)(keras.layers.LayerNormalization()(vectors))
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(vectors)))

    def optimizer(self, model: keras.Model, lr: float) -> keras.optimizers.Optimizer:
        """Clips at each step. Epsilon is above the rounding of gradients that are 0 but for it, the keys' biases'."""
        return keras.optimizers.Adam(lr, global_clipnorm=0.5, epsilon=1e-4)

    def train_data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(1)
        ids = np.stack([rng.integers(rows, size=SAMPLES) for rows in TABLES], 1)
        return ids, rng.normal(size=SAMPLES).astype("float32")

    def eval_data(self) -> tuple[np.ndarray, np.ndarray]:
        return self.train_data()

    def loss(self, model: keras.Model, batch: Any, training: bool = True) -> tf.Tensor:
        ids, wanted = batch
        return (model(ids, training=training)[:, 0] - wanted) ** 2
