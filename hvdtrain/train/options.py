"""What a task job lets its user choose, checked before anything heavy is loaded."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Options(BaseModel):
    """Options that every task has. A task adds its own in a subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training data."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Samples per worker and step; the global batch is this times the number of workers."""

    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate for one worker."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate grows with the number of workers: `linear` keeps SGD's expected step (Goyal et al. 2017,
    arXiv:1706.02677), `sqrt` keeps its variance."""

    lr_decay: Literal["none", "cosine"] = "none"
    """`cosine`: falls to zero at the last step (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 0
    """Epochs over which the rate rises to its full value: from `lr` where it is scaled, else from zero."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the initial weights and the order of the samples."""

    log_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two lines of progress. Default: 100; the end of an epoch always gives one."""

    evaluate_first: bool = False
    """Evaluate before the first step too."""


OptionsT = TypeVar("OptionsT", bound=Options)


class BadTaskError(Exception):
    """The task or its options can't be used; the message is for the user."""


def parse_options(model: type[OptionsT], values: dict[str, Any]) -> OptionsT:
    """The options as the task's model has them.

    Raises:
        BadTaskError: unknown options, wrong types or values; all of them.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        messages = [_explain(model, fault) for fault in error.errors(include_url=False)]
        raise BadTaskError("\n".join(messages)) from error


def _explain(model: type[Options], fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(sorted(model.model_fields))}"
        return f"options.{name}: unknown option; {hint}"
    message = fault["msg"]
    return f"options.{name}: {message[0].lower()}{message[1:]}, not {fault['input']!r}"
