"""A training task in Keras 3 on TensorFlow."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.train import task
from hvdtrain.train.backend import Backend
from hvdtrain.train.settings import Settings


class Task(task.Task):
    """Subclass it and give its place, ``module:Class``, as a job's ``task`` (docs/tasks.md has a whole one).

    Data is an array with the sample first, or such arrays in any nesting of tuples, lists and dicts. For data that
    doesn't fit in memory it is an object with ``len()`` whose ``[numbers]``, an int64 array, gives the batch of these
    samples in such a nesting. A batch has tensors in the same nesting.
    """

    @abstractmethod
    def model(self) -> keras.Model:
        """The model. Initial weights may differ by rank: rank 0's are taken."""

    @abstractmethod
    def optimizer(self, model: keras.Model, lr: float) -> keras.optimizers.Optimizer:
        """A plain optimizer, with ``lr`` as its learning rate. The loop distributes it and sets its rate at each step.

        Clipping, weight decay and accumulation are the optimizer's own. In a model with the policy ``mixed_float16``
        the loss is scaled.
        """

    @abstractmethod
    def train_data(self) -> Any:
        """All training samples, on every rank the same; the loop shares them out."""

    def eval_data(self) -> Any:
        """All samples of the evaluation, likewise; None: no evaluation."""
        return None

    @abstractmethod
    def loss(self, model: keras.Model, batch: Any, training: bool = True) -> tf.Tensor:
        """The batch's mean loss, or one loss per sample, shape ``[samples]``.

        It is traced once into a TensorFlow graph, without AutoGraph: conditions on a batch's values need `tf.cond`.
        Call the model with ``training=training``. If its layers have regularizers, add ``sum(model.losses)``.
        """

    def metrics(self, model: keras.Model, batch: Any) -> dict[str, tf.Tensor]:
        """What the evaluation reports as ``eval_<name>``: each a mean of the batch or one value per sample.

        Call the model with ``training=False``.
        """
        return {"loss": self.loss(model, batch, training=False)}

    def backend(self, settings: Settings) -> Backend:
        """Start TensorFlow and Horovod in this process."""
        # Horovod is loaded when training starts, so that a task's options can be checked where it isn't built.
        from hvdtrain.train.keras.backend import KerasBackend

        return KerasBackend(self, settings)
