"""Handwritten digits: the UCI test set that scikit-learn carries, 1,797 images of 8 x 8 pixels, split once and for all.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TEST_SAMPLES = 360
CLASSES = 10
_BRIGHTEST = 16.0


def load() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Training images and labels, test images and labels.

    Images are ``[n, 8, 8, 1]`` in 0 to 1, labels ``[n]`` in 0 to 9. 1,437 for training and 360 for the test, each digit
    with the same share in both. The split is the same on every rank and in every run.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / _BRIGHTEST).astype(np.float32).reshape(-1, 8, 8, 1)
    split: list[Any] = train_test_split(
        images, labels.astype(np.int64), test_size=TEST_SAMPLES, stratify=labels, random_state=0
    )
    train_images, test_images, train_labels, test_labels = split
    return train_images, train_labels, test_images, test_labels
