"""A small CNN on handwritten digits, in Keras."""

from __future__ import annotations

from typing import Annotated

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain.tasks import digits_data
from hvdtrain.train.keras import Options, Task

Batch = tuple[tf.Tensor, tf.Tensor]


class DigitsOptions(Options):
    """Options of `Digits`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of stochastic gradient descent."""


class Digits(Task):
    """Ten classes, 1,437 training and 360 test images, stochastic gradient descent with momentum."""

    options: DigitsOptions

    def model(self) -> keras.Model:
        """Two convolutions and two dense layers, 153,000 parameters."""
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(digits_data.CLASSES),
            ]
        )

    def optimizer(self, model: keras.Model, lr: float) -> keras.optimizers.Optimizer:
        """Nesterov's momentum."""
        return keras.optimizers.SGD(lr, momentum=self.options.momentum, nesterov=self.options.momentum > 0)

    def train_data(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Images ``[1437, 8, 8, 1]`` and labels."""
        images, labels, _, _ = digits_data.load()
        return images, labels

    def eval_data(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Images ``[360, 8, 8, 1]`` and labels."""
        _, _, images, labels = digits_data.load()
        return images, labels

    def loss(self, model: keras.Model, batch: Batch, training: bool = True) -> tf.Tensor:
        """Cross-entropy of each image."""
        images, labels = batch
        logits = model(images, training=training)
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

    def metrics(self, model: keras.Model, batch: Batch) -> dict[str, tf.Tensor]:
        """Accuracy and cross-entropy."""
        images, labels = batch
        logits = model(images, training=False)
        return {
            "accuracy": keras.metrics.sparse_categorical_accuracy(labels, logits),
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
        }
