"""What the launcher tells the loop beside the task's own options: the job spec's ``checkpoint`` and ``horovod``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointSettings(BaseModel):
    """When to save, and how many to keep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: Annotated[int, Field(ge=1)] | None = 100
    keep: Annotated[int, Field(ge=1)] = 3


class Settings(BaseModel):
    """`hvdtrain.contract.SETTINGS` as a type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: CheckpointSettings = CheckpointSettings()
    compression: Literal["none", "fp16"] = "none"
