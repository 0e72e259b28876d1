"""`DistributedOptimizer`: any Keras 3 optimizer, on gradients that are averaged over the ranks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.compression import Compression, compression_of
from hvdtrain.keras.exchange import AdasumExchange, Exchange, GradientExchange, GridExchange
from hvdtrain.parallel.adasum import require_mpi
from hvdtrain.parallel.cut import cut_of, mark
from hvdtrain.parallel.groups import Groups

_numbers = itertools.count()

# They reckon with means, norms or products over a whole variable, of which a rank may have a part.
_OF_WHOLE_VARIABLES = ("Adafactor", "Lamb", "Muon")


class _Distributed:
    """What a distributed optimizer's class has before the user's own class.

    Gradients are reduced before anything else is done to them, so that clipping, weight decay and moments see what one
    process with all samples would see. Under Keras's gradient accumulation that is when a full step is applied.
    """

    _gradient_exchange: Exchange
    _variables_of_step: list[Any]
    _trainable_variables: list[Any]
    gradient_accumulation_steps: int | None
    global_clipnorm: float | None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if grads and not self.gradient_accumulation_steps:
            grads = self._gradient_exchange.reduce(grads, self._trainable_variables if variables is None else variables)
        super().apply(grads, variables)  # type: ignore[misc]

    def add_variable_from_reference(self, reference_variable: Any, *arguments: Any, **options: Any) -> Any:
        variable = super().add_variable_from_reference(reference_variable, *arguments, **options)  # type: ignore[misc]
        # What is kept for a part of a variable is a part itself: checkpoints put both together.
        cut = cut_of(reference_variable)
        return mark(variable, cut) if cut else variable

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Without those that have no gradient. Not a plain assignment, by which Keras would track them as its own.
        object.__setattr__(self, "_variables_of_step", list(trainable_variables))
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras calls it first of all with the accumulated gradients.
        if self.gradient_accumulation_steps:
            grads = self._gradient_exchange.reduce(grads, self._variables_of_step)
        if self.global_clipnorm:
            clipped = self._gradient_exchange.clip(grads, self._variables_of_step, self.global_clipnorm)
            if clipped is not None:
                return clipped
        return super()._clip_gradients(grads)  # type: ignore[misc]


def _distributed_class(base: type) -> type:
    """A subclass of the optimizer class `base` that Keras saves as `base` itself.

    Keras asks an object for its `__class__` when it saves it, and Python its type when it calls a method.
    """
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Distributed, base), {**names, "__class__": property(lambda _: base)})


def DistributedOptimizer(  # noqa: N802 - Horovod's name for it in every framework
    optimizer: keras.optimizers.Optimizer,
    *,
    compression: Any = Compression.none,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    groups: int = 1,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    parallel: Groups | None = None,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer average its gradients over all ranks before it applies them.

    The optimizer itself is changed and returned, with its state, hyperparameters and schedule; models that were
    compiled with it train distributed from now on. Make the same ones in the same order on every rank.

    Args:
        optimizer: any Keras 3 optimizer, built or not, `LossScaleOptimizer` and `MultiOptimizer` included.
        compression: of gradients on the wire, one of `Compression`.
        op: `Average`; `Sum`, for losses that are already divided by the global number of samples; or `Adasum`, which
            needs MPI and a number of ranks that is a power of two, and goes with none of the options below but
            ``backward_passes_per_step``.
        backward_passes_per_step: calls of `apply` for each step. Their gradients are averaged here and reduced once;
            the same as Keras's own `gradient_accumulation_steps`, which may be used instead.
        groups: collectives that the gradients of one dtype are split into. One is best for small models; more let
            early gradients travel while later ones are computed.
        process_set: ranks to average over.
        parallel: instead, this rank's groups on a grid, some of whose ranks share layers or embedding tables. Gradients
            are averaged over ``parallel.replicas``, and clipped by the norm over all parts with ``global_clipnorm``.

    Returns:
        The same object. It saves and loads as its original class, without Horovod.

    Raises:
        UsageError: not a Keras 3 optimizer, one that is distributed already, or arguments that don't go together.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer needs a Keras 3 optimizer, not {optimizer!r}",
            fix="pass an object such as keras.optimizers.SGD(0.1)",
        )
    _check(op, backward_passes_per_step, groups)
    if op == hvd.Adasum:
        _check_adasum(compression, groups, process_set, parallel)
    if parallel is not None:
        _check_parallel(optimizer, parallel, process_set)
    if any(isinstance(part, _Distributed) for part in _parts(optimizer)):
        raise UsageError(
            f"the optimizer {optimizer.name!r} is distributed already: its gradients would be averaged twice",
            fix="call DistributedOptimizer once for each optimizer",
        )
    _teach_keras()
    target = optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _require_keras_method(type(optimizer), "check_finite", keras.optimizers.LossScaleOptimizer)
        # Reduced after the loss scale is taken out, so that fp16 on the wire doesn't overflow by it.
        target = optimizer.inner_optimizer
    _set_accumulation(target, backward_passes_per_step)
    name, compression = f"DistributedOptimizer_{next(_numbers)}", compression_of(compression)
    exchange: Exchange
    if op == hvd.Adasum:
        exchange = AdasumExchange(name)
    elif parallel:
        exchange = GridExchange(name, compression, op, groups, parallel)
    else:
        exchange = GradientExchange(name, compression, op, groups, process_set)
    object.__setattr__(target, "_gradient_exchange", exchange)
    object.__setattr__(target, "__class__", _distributed_class(type(target)))
    return optimizer


def load_model(
    filepath: Any, *, custom_objects: dict[str, Any] | None = None, safe_mode: bool = True, **options: Any
) -> keras.Model:
    """Loads a saved model and makes its optimizer, with the state that it was saved with, distributed.

    Args:
        filepath: a `.keras` or `.h5` file that every rank can read.
        custom_objects: as of `keras.saving.load_model`.
        safe_mode: as of `keras.saving.load_model`.
        options: of `DistributedOptimizer`.

    Raises:
        UsageError: the model was saved without an optimizer.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects, safe_mode=safe_mode)
    if getattr(model, "optimizer", None) is None:
        raise UsageError(
            "the saved model has no optimizer to make distributed",
            where=str(filepath),
            fix="load it with keras.saving.load_model and compile it with a DistributedOptimizer",
        )
    DistributedOptimizer(model.optimizer, **options)
    model.jit_compile = False  # The file may come from a machine where Keras chose XLA.
    return model


def _exchange_of(optimizer: Any) -> Exchange | None:
    return next((part._gradient_exchange for part in _parts(optimizer) if isinstance(part, _Distributed)), None)


def _parts(optimizer: Any) -> list[Any]:
    """The optimizer and those that it hands gradients on to."""
    inner = [optimizer.inner_optimizer] if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else []
    inner += getattr(optimizer, "optimizers", [])  # MultiOptimizer's, in newer releases of Keras
    return [optimizer, *itertools.chain.from_iterable(_parts(part) for part in inner)]


def _check(op: Any, backward_passes_per_step: int, groups: int) -> None:
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise UsageError(
            "gradients can be reduced by Average, Sum or Adasum", fix="pass op=hvd.Average, hvd.Sum or hvd.Adasum"
        )
    for name, value in {"backward_passes_per_step": backward_passes_per_step, "groups": groups}.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_adasum(compression: Any, groups: int, process_set: Any, parallel: Groups | None) -> None:
    require_mpi(hvd)
    if hvd.size() & (hvd.size() - 1):
        raise UsageError(
            f"Adasum combines gradients in pairs, and {hvd.size()} ranks aren't a power of two",
            fix="start 2, 4, 8, … ranks, or pass op=hvd.Average",
        )
    unfit = {
        "compression": compression is not Compression.none,
        "groups": groups != 1,
        "process_set": process_set is not hvd.global_process_set,
        "parallel": parallel is not None,
    }
    for name, is_given in unfit.items():
        if is_given:
            raise UsageError(
                f"{name} doesn't go with Adasum, which takes each gradient of all ranks as it is",
                fix=f"leave {name} out, or pass op=hvd.Average",
            )


def _check_parallel(optimizer: keras.optimizers.Optimizer, parallel: Groups, process_set: Any) -> None:
    if process_set is not hvd.global_process_set:
        raise UsageError("both process_set and parallel say whom to average over", fix="give one of them")
    is_cut = parallel.model.size > 1 or parallel.embedding.size > 1
    if is_cut and any(getattr(part, "clipnorm", None) for part in _parts(optimizer)):
        raise UsageError(
            "clipnorm would clip each rank's part of a variable by the part's own norm",
            where=f"the optimizer {optimizer.name!r} on a grid of {parallel.grid.size} ranks",
            fix="use global_clipnorm, which is taken over all parts, or clipvalue",
        )
    kinds = {type(part).__name__ for part in _parts(optimizer)}
    unfit = sorted(kinds & {*_OF_WHOLE_VARIABLES, "MultiOptimizer"})
    if is_cut and unfit:
        raise UsageError(
            f"{unfit[0]} needs whole variables and all of them, and each rank has parts",
            where=f"a grid of {parallel.grid.size} ranks",
            fix="use an optimizer that works number by number, such as Adam or SGD",
        )
    if is_cut and optimizer.built:
        raise UsageError(
            f"the optimizer {optimizer.name!r} has its variables already, which don't say what they are parts of",
            fix="make it distributed before it is built",
        )


def _set_accumulation(optimizer: keras.optimizers.Optimizer, steps: int) -> None:
    """Makes the optimizer accumulate over `steps` calls, unless that is 1; checks that its gradients can be reduced."""
    if steps == 1 and not optimizer.gradient_accumulation_steps:
        return
    if steps > 1 and optimizer.gradient_accumulation_steps:
        raise UsageError(
            f"the optimizer already accumulates over {optimizer.gradient_accumulation_steps} steps",
            fix="give either gradient_accumulation_steps or backward_passes_per_step",
        )
    if steps > 1 and optimizer.built:
        raise UsageError(
            "an optimizer that has its variables already can't start to accumulate gradients",
            fix=f"make it with gradient_accumulation_steps={steps}, or make it distributed before it is built",
        )
    for name in ("apply", "_backend_apply_gradients"):
        _require_keras_method(type(optimizer), name, keras.optimizers.Optimizer)
    if steps > 1:
        optimizer.gradient_accumulation_steps = steps


def _require_keras_method(optimizer_class: type, name: str, keras_class: type) -> None:
    """The ranks meet inside these methods of Keras's: a class with its own would leave some of them waiting."""
    if getattr(optimizer_class, name) is not getattr(keras_class, name):
        raise UsageError(
            f"{optimizer_class.__name__} has its own {name}, in whose place Keras's would keep the ranks together",
            fix="accumulate gradients or scale the loss in your own training loop, and give DistributedOptimizer "
            "an optimizer without either",
        )


@functools.cache
def _teach_keras() -> None:
    """Teaches Keras the two things that `Model.compile` decides out of an optimizer's sight.

    Under mixed_float16 it puts a `LossScaleOptimizer` around the given optimizer, which skips a step when gradients
    overflow: all ranks must skip it together, or those that don't wait for the others for ever. And on a GPU
    `jit_compile="auto"` means XLA, which has no Horovod operations.
    """
    check_finite = keras.optimizers.LossScaleOptimizer.check_finite
    resolve_jit = keras.Model._resolve_auto_jit_compile

    @functools.wraps(check_finite)
    def check_finite_everywhere(self: Any, grads: Any) -> Any:
        exchange = _exchange_of(self)
        finite = check_finite(self, grads)
        return exchange.agree(finite) if exchange else finite

    @functools.wraps(resolve_jit)
    def resolve_jit_without_horovod(self: Any) -> bool:
        return bool(resolve_jit(self)) and _exchange_of(self.optimizer) is None

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite_everywhere
    keras.Model._resolve_auto_jit_compile = resolve_jit_without_horovod
