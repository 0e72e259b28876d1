"""Handwritten digits: 1,797 images of 8 x 8 pixels that scikit-learn carries (UCI, optical recognition)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Images are float32 of shape [n, 8, 8, 1] in 0 to 1, labels int64 of shape [n] from 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """The digits, a fifth of each class set apart for the test, always the same."""
    data = load_digits()
    images = (data.images[..., np.newaxis] / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, data.target.astype(np.int64), test_size=0.2, stratify=data.target, random_state=0
    )
    return Digits(train_images, train_labels, test_images, test_labels)
