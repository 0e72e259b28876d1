"""What must hold before a Keras model can train on Horovod."""

from __future__ import annotations

from hvdtrain.errors import StartError


def require_tensorflow_keras(version: str, backend: str) -> None:
    """Refuse a Keras that this layer can't average the gradients of.

    Args:
        version: Keras's version.
        backend: name of the backend that Keras runs on.

    Raises:
        StartError: Keras 2, or Keras 3 on another backend than TensorFlow.
    """
    if int(version.split(".")[0]) < 3:
        raise StartError(
            f"hvdtrain.keras needs Keras 3, this is Keras {version}",
            fix="install keras>=3 and unset TF_USE_LEGACY_KERAS, or stay with horovod.tensorflow.keras, "
            "which is made for Keras 2",
        )
    if backend != "tensorflow":
        raise StartError(
            f"hvdtrain.keras needs Keras on TensorFlow, it runs on {backend} here",
            fix="set KERAS_BACKEND=tensorflow before Keras is imported, or change `backend` in keras.json",
        )
