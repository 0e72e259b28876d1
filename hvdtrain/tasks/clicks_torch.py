"""A recommender on made-up clicks, with embedding tables that the processes share, in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.tasks import clicks_data
from hvdtrain.train.torch import Task

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Clicks(Task):
    """Predicts clicks. Reports the log loss, and how much of it a better model could do without.

    The embedding tables are cut over the processes of ``parallelism.embedding``; without it, each has all of them.
    """

    options: clicks_data.ClicksOptions

    def model(self) -> nn.Module:
        """See `DLRM`."""
        # Horovod is loaded when training starts, so that options can be checked where it isn't built.
        from hvdtrain.parallel.torch.embedding import ParallelEmbedding

        embedding = ParallelEmbedding(self.options.rows, self.options.width, self.groups.embedding)
        return DLRM(embedding, len(self.options.rows), self.options.width, self.options.hidden)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(model.parameters(), lr)

    def train_data(self) -> TensorDataset:
        """Ids, numbers, clicks and the least log losses; see `clicks_data.Clicks`."""
        return self._draw(self.options.samples, evaluation=False)

    def eval_data(self) -> TensorDataset:
        """Likewise, of other samples."""
        return self._draw(self.options.eval_samples, evaluation=True)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Log loss in nats, one value per sample."""
        ids, numbers, clicked, _ = batch
        return functional.binary_cross_entropy_with_logits(model(ids, numbers), clicked, reduction="none")

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Log loss, and how much it is above that of the true probabilities."""
        log_loss = self.loss(model, batch)
        return {"log_loss": log_loss, "excess_log_loss": log_loss - batch[3]}

    def _draw(self, samples: int, *, evaluation: bool) -> TensorDataset:
        drawn = clicks_data.draw(self.options.rows, samples, self.options.data_seed, evaluation=evaluation)
        arrays = (drawn.ids, drawn.numbers, drawn.clicked, drawn.best_log_loss)
        return TensorDataset(*map(torch.from_numpy, arrays))


class DLRM(nn.Module):
    """Dense layers below and above the products of all pairs of vectors (Naumov et al. 2019, section 2).

    Takes ids ``[samples, fields]`` as int64 and numbers ``[samples, NUMBERS]``, gives log-odds ``[samples]``.

    Args:
        embedding: from ids to ``[samples, fields, width]``, with a ``weight``.
        fields: of the ids.
        width: of a vector.
        hidden: units of the layer above the products.
    """

    def __init__(self, embedding: nn.Module, fields: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = embedding
        # Vectors of length 1 have products so large that the first steps are spent on making them smaller.
        with torch.no_grad():
            embedding.weight.mul_(0.1)
        self.bottom = nn.Sequential(
            nn.Linear(clicks_data.NUMBERS, -(-hidden // 2)), nn.ReLU(), nn.Linear(-(-hidden // 2), width), nn.ReLU()
        )
        vectors = fields + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + vectors * (vectors - 1) // 2, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The log-odds of each sample's click."""
        dense = self.bottom(numbers)
        vectors = torch.cat([dense.unsqueeze(1), self.embedding(ids)], 1)
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        log_odds: torch.Tensor = self.top(torch.cat([dense, products], 1))
        return log_odds.squeeze(1)
