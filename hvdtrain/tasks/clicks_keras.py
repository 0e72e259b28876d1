"""A recommender on made-up clicks, with embedding tables that the processes share, in Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.tasks import clicks_data
from hvdtrain.train.keras import Task

Batch = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]
Arrays = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


@keras.saving.register_keras_serializable("hvdtrain")
class PairwiseProducts(keras.layers.Layer):
    """Products of all pairs of a sample's vectors: ``[samples, n, width]`` to ``[samples, n (n - 1) / 2]``."""

    def call(self, vectors: Any) -> Any:
        """Each pair once."""
        count = vectors.shape[1]
        first, second = np.triu_indices(count, 1)
        products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
        return keras.ops.take(keras.ops.reshape(products, (-1, count * count)), first * count + second, axis=1)


class Clicks(Task):
    """Predicts clicks. Reports the log loss, and how much of it a better model could do without.

    The embedding tables are cut over the processes of ``parallelism.embedding``; without it, each has all of them.
    """

    options: clicks_data.ClicksOptions

    def model(self) -> keras.Model:
        """Dense layers below and above the products of all pairs of vectors (Naumov et al. 2019, section 2)."""
        # Horovod is loaded when training starts, so that options can be checked where it isn't built.
        from hvdtrain.parallel.keras.embedding import ParallelEmbedding

        options, layers = self.options, keras.layers
        ids = keras.Input((len(options.rows),), dtype="int64")
        numbers = keras.Input((clicks_data.NUMBERS,))
        dense = layers.Dense(-(-options.hidden // 2), activation="relu")(numbers)
        dense = layers.Dense(options.width, activation="relu")(dense)
        # Vectors of length 1 have products so large that the first steps are spent on making them smaller.
        initializer = keras.initializers.RandomNormal(stddev=0.1)
        embedded = ParallelEmbedding(
            options.rows, options.width, self.groups.embedding, embeddings_initializer=initializer
        )(ids)
        vectors = layers.Concatenate(1)([layers.Reshape((1, options.width))(dense), embedded])
        joint = layers.Concatenate()([dense, PairwiseProducts()(vectors)])
        log_odds = layers.Dense(1)(layers.Dense(options.hidden, activation="relu")(joint))
        return keras.Model([ids, numbers], layers.Reshape(())(log_odds))

    def optimizer(self, model: keras.Model, lr: float) -> keras.optimizers.Optimizer:
        """Adam."""
        return keras.optimizers.Adam(lr)

    def train_data(self) -> Arrays:
        """Ids, numbers, clicks and the least log losses; see `clicks_data.Clicks`."""
        return self._draw(self.options.samples, evaluation=False)

    def eval_data(self) -> Arrays:
        """Likewise, of other samples."""
        return self._draw(self.options.eval_samples, evaluation=True)

    def loss(self, model: keras.Model, batch: Batch, training: bool = True) -> tf.Tensor:
        """Log loss in nats, one value per sample."""
        ids, numbers, clicked, _ = batch
        return tf.nn.sigmoid_cross_entropy_with_logits(clicked, model([ids, numbers], training=training))

    def metrics(self, model: keras.Model, batch: Batch) -> dict[str, tf.Tensor]:
        """Log loss, and how much it is above that of the true probabilities."""
        log_loss = self.loss(model, batch, training=False)
        return {"log_loss": log_loss, "excess_log_loss": log_loss - batch[3]}

    def _draw(self, samples: int, *, evaluation: bool) -> Arrays:
        drawn = clicks_data.draw(self.options.rows, samples, self.options.data_seed, evaluation=evaluation)
        return drawn.ids, drawn.numbers, drawn.clicked, drawn.best_log_loss
