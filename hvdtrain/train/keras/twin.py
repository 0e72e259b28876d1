"""Writing a Keras model while it trains on: a second one takes its values and is written by another thread."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.train import random_state

_FILE = "model.keras"


class Twin:
    """A model's second, in the host's memory, made from what Keras has saved of the first.

    Raises:
        Exception: Keras can't make it, as where a class of the model has no fitting ``get_config()``.
    """

    def __init__(self, model: keras.Model, saved: Path) -> None:
        with tf.device("CPU:0"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = keras.saving.load_model(saved, safe_mode=False)
        ours, theirs = variables_of(model), variables_of(self._model)
        if [(v.shape, v.dtype) for v in ours] != [(v.shape, v.dtype) for v in theirs]:
            raise ValueError(f"it comes back with {len(theirs)} variables of {len(ours)}, or of other shapes")
        self._pairs = list(zip(ours, theirs, strict=True))

    def take(self) -> Callable[[Path], None]:
        """Take the model's values; what is returned writes them to a file."""
        for mine, its in self._pairs:
            # TensorFlow copies a value before it is next changed, if not here.
            its.assign(mine.value)
        return self._model.save


class Saver:
    """Copies a model, by its twin where it can have one.

    Raises:
        UsageError: Keras can't save it.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._twin: Twin | None = None
        # Layers that are made draw their seeds from the streams that the training uses.
        streams = random_state.capture()
        with tempfile.TemporaryDirectory() as folder:
            try:
                model.save(Path(folder) / _FILE)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise UsageError(
                    f"Keras can't save the model: {error}", fix="give the class that is named a get_config()"
                ) from error
            try:
                self._twin = Twin(model, Path(folder) / _FILE)
            except Exception as error:
                reason = str(error).partition("\n")[0]
                sys.stderr.write(
                    f"warning: Keras can't make the model again from what it saves ({type(error).__name__}: {reason}); "
                    "each checkpoint stops the training until its file is written\n"
                )
        random_state.restore(streams)

    def take(self) -> Callable[[Path], None]:
        """Take the model's values; what is returned writes them to a file, once and before they are taken again."""
        if self._twin is not None:
            return self._twin.take()
        folder = Path(tempfile.mkdtemp())
        self._model.save(folder / _FILE)

        def write(path: Path) -> None:
            shutil.move(folder / _FILE, path)
            folder.rmdir()

        return write


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Of model and optimizer, each once."""
    return list({id(variable): variable for variable in [*model.variables, *model.optimizer.variables]}.values())
