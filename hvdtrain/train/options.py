"""What a task job lets its user choose, checked before training starts."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvdtrain.errors import InputError, Problem


class Options(BaseModel):
    """Options of every task. A task with more of its own declares a subclass (docs/tasks.md)."""

    # Strict: "3" is no number, and 2.5 epochs are an error instead of 2.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training data."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Samples per worker and step. The global batch is this times the number of workers."""

    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate, before `lr_scaling`."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of `lr` for N workers: 1, N or the square root of N."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 0
    """The rate rises linearly over these epochs: from `lr` to the scaled rate, or from 0 without scaling."""

    lr_decay: Literal["none", "linear", "cosine"] = "none"
    """How the rate falls to 0 from the end of the warm-up to the end of the training."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the initial weights, the order of the samples and the framework's random numbers."""

    log_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two lines of progress; null: about ten lines in all, and one per 100 steps at least."""

    evaluate_every_epochs: Annotated[int, Field(ge=1)] | None = 1
    """Epochs between two evaluations; null: only at the end, where there always is one."""

    evaluate_first: bool = False
    """Evaluate before the first step too."""

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Options:
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs:g}) can't be more than epochs ({self.epochs})")
        return self


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], text: str) -> OptionsT:
    """A JSON object of options as the task's own model.

    Raises:
        InputError: unknown options, wrong types or values out of range; all of them.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise InputError(_problem(model, fault) for fault in error.errors(include_url=False)) from error


def _problem(model: type[Options], fault: Any) -> Problem:
    name = ".".join(str(part) for part in fault["loc"])
    source = f"options.{name}" if name else "options"
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(model.model_fields))}"
        return Problem(source, 0, 0, f"unknown option; {hint}")
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    message = message[0].lower() + message[1:]
    # A fault of the whole, from a check of several options, names them itself.
    return Problem(source, 0, 0, f"{message}, not {fault['input']!r}" if name else message)
