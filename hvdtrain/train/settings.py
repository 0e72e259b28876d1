"""What the launcher tells the loop beside the task's own options: parts of the job spec."""

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


class ParallelismSettings(BaseModel):
    """How a training is divided, beside the grid of ranks (`hvdtrain.parallel.groups`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shard_optimizer: bool = False
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    cut_by: Literal["parameters", "time"] = "parameters"
    recompute: bool = False


class Settings(BaseModel):
    """`hvdtrain.contract.SETTINGS` as a type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: CheckpointSettings = CheckpointSettings()
    compression: Literal["none", "fp16", "bf16", "topk", "auto"] = "none"
    adasum: bool = False
    parallelism: ParallelismSettings = ParallelismSettings()
    elastic: ElasticSettings | None = None

    def batches_of(self, replicas: int) -> int:
        """Of how many batches a step of so many replicas takes the samples, and the rate is for."""
        return self.elastic.workers if self.elastic and self.elastic.batch == "keep_global" else replicas
