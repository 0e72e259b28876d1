"""What the layers that a group of ranks shares have in common, and the dropout between them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import Cut, bounds, mark
from hvdtrain.parallel.groups import ALONE, Group

# Not Keras's names: those count up on a rank that makes one layer more, of whatever kind.
_numbers = itertools.count()


class SharedLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer that the ranks of a group share.

    Args:
        group: None: this rank alone, as in a model that was saved and is loaded, for a configuration doesn't say who
            the ranks are.
        options: of `keras.layers.Layer`.

    Attributes:
        collective: beginning of the names of its collectives.
    """

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.group = group or ALONE
        # A layer that doesn't meet others takes no number: rank 0 alone may make a model's second, to save it.
        self.collective = f"layer_{next(_numbers)}" if self.group.size > 1 else ""
        self.supports_jit = False  # XLA has no Horovod operations.
        self.supports_masking = True

    def add_part(self, name: str, whole: tuple[int, ...], initializer: Any, cut: Cut) -> Any:
        """A variable with this rank's part of a whole one, whose initial value is made here and then cut."""
        shape = list(whole)
        first, end = bounds(whole[cut.dim] // cut.blocks, self.group.size, self.group.rank)
        shape[cut.dim] = cut.blocks * (end - first)

        def part(_: Any, dtype: Any = None) -> tf.Tensor:
            return _part_of(tf.convert_to_tensor(initializer(whole, dtype=dtype)), cut, self.group)

        return mark(self.add_weight(name=name, shape=shape, initializer=part), cut)

    def get_build_config(self) -> None:
        """None, in place of Keras's shape of the input, which may be a part of it: the first call builds the layer."""


@keras.saving.register_keras_serializable("hvdtrain")
class ParallelDropout(keras.layers.Dropout):  # type: ignore[misc]
    """`keras.layers.Dropout` that drops the same on all ranks of a group, and not the same elsewhere.

    Args:
        rate: share that is dropped.
        group: the ranks that share the layers around; None: as of `SharedLayer`.
        cut: whether each rank has other activations: the ranks of the group then drop each on its own.
        seed: the same on all ranks; None: from Python's random numbers, as `keras.utils.set_random_seed` set them.
        options: of `keras.layers.Layer`.
    """

    def __init__(
        self, rate: float, group: Group | None = None, *, cut: bool = False, seed: int | None = None, **options: Any
    ) -> None:
        if seed is None and rate > 0:
            seed = random.randint(1, 10**9)  # noqa: S311 - as Keras makes its own
        group, common = group or ALONE, seed or 0
        super().__init__(rate, seed=common + group.ranks[group.rank if cut else 0], **options)
        self._cut, self._common = cut, common
        if cut and rate > 0:
            # Whoever seeds the model's generators anew sees by it that each rank needs a seed of its own.
            mark(self.seed_generator.state, Cut("tensor", 0))

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        config = super().get_config()
        del config["noise_shape"]
        return {**config, "cut": self._cut, "seed": self._common}


def build_inner(layer: keras.layers.Layer, input_shape: Any) -> None:
    """Make the variables of a layer within a layer, under its own name."""
    with keras.name_scope(layer.name, caller=layer):
        layer.build(input_shape)


def require_even(what: str, total: int, blocks: int, group: Group, layer: str) -> None:
    """Refuse what can't be cut into blocks of which each rank has as much as any other.

    Raises:
        UsageError: it isn't a multiple.
    """
    if total % (blocks * group.size):
        of_blocks = f" in {blocks} blocks" if blocks > 1 else ""
        raise UsageError(
            f"{layer} can't share out {total} {what}{of_blocks} evenly among {group.size} ranks",
            where=f"group {group.name}",
            fix=f"let their number be a multiple of {blocks * group.size}",
        )


def _part_of(whole: tf.Tensor, cut: Cut, group: Group) -> tf.Tensor:
    size = whole.shape[cut.dim] // cut.blocks
    first, end = bounds(size, group.size, group.rank)
    columns = [block * size + number for block in range(cut.blocks) for number in range(first, end)]
    return tf.gather(whole, columns, axis=cut.dim)
