"""The Keras 3 backend, on TensorFlow."""
