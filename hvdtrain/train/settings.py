"""What the launcher tells the loop beside the task's own options: the job spec's ``checkpoint`` and ``horovod``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointSettings(BaseModel):
    """When to save, and how many to keep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = 100
    keep: Annotated[int, Field(ge=1)] = 3


class ElasticSettings(BaseModel):
    """What a resize keeps. ``workers``: how many there were at the job's start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: Literal["keep_per_worker", "keep_global"] = "keep_per_worker"
    workers: Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """`hvdtrain.contract.SETTINGS` as a type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: CheckpointSettings = CheckpointSettings()
    compression: Literal["none", "fp16"] = "none"
    elastic: ElasticSettings | None = None

    def batches_of(self, size: int) -> int:
        """Of how many workers' batches a step of ``size`` workers takes the samples, and the rate is for."""
        return self.elastic.workers if self.elastic and self.elastic.batch == "keep_global" else size
