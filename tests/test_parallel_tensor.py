"""Tensor parallelism in PyTorch: a group of one is PyTorch itself; groups of two and four, for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from parallel_tensor_twins import Attention, Model, mlp  # noqa: E402
from real_processes import CROWDED, python_on_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from hvdtrain.errors import UsageError  # noqa: E402
from hvdtrain.parallel.groups import Group  # noqa: E402
from hvdtrain.parallel.torch.streams import own_stream  # noqa: E402
from hvdtrain.parallel.torch.tensor import (  # noqa: E402
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)

CASES = Path(__file__).parent / "parallel_tensor_cases.py"

# Horovod isn't started here: a collective would fail.
ALONE = Group("tensor", (0,), 0, None)
FIRST_OF_TWO = Group("tensor", (0, 1), 0, None)
FIRST_OF_FOUR = Group("tensor", (0, 1, 2, 3), 0, None)


@pytest.mark.processes
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_ranks_that_share_layers_do_what_one_process_does(controller: str, tmp_path: Path) -> None:
    """In groups of two (beside data parallelism) and of four; the cases say what."""
    output = python_on_ranks(controller, 4, tmp_path, str(CASES), env=CROWDED, timeout=280)
    assert all(f"RANK {rank} DONE" in output for rank in range(4))


@pytest.mark.parametrize(
    ("plain", "alone", "inputs"),
    [
        (lambda: nn.Linear(6, 9), lambda: ColumnParallelLinear(6, 9, ALONE, blocks=3), (2, 3, 6)),
        (lambda: nn.Linear(6, 9), lambda: ColumnParallelLinear(6, 9, ALONE, gather_output=True), (6,)),
        (lambda: nn.Linear(6, 9, bias=False), lambda: RowParallelLinear(6, 9, ALONE, bias=False), (2, 6)),
        (lambda: Attention(8, 2, dropout=0.3), lambda: ParallelAttention(8, 2, ALONE, dropout=0.3), (2, 3, 8)),
        (lambda: mlp(8, 16, dropout=0.3), lambda: ParallelMLP(8, 16, ALONE, dropout=0.3), (2, 3, 8)),
    ],
)
def test_alone_a_layer_is_pytorchs_own(
    plain: Callable[[], nn.Module], alone: Callable[[], nn.Module], inputs: tuple[int, ...]
) -> None:
    results = []
    for make in (plain, alone):
        torch.manual_seed(3)
        layer = make()
        given = torch.randn(inputs, requires_grad=True)
        output = layer(given)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append({"output": output, "input": given.grad, "next": torch.rand(2), **gradients})
    theirs, ours = results
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_alone_a_model_is_pytorchs_own() -> None:
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))
    losses = []
    for group in (None, ALONE):
        torch.manual_seed(3)
        model = Model(group)
        loss = model.loss(tokens)
        loss.backward()
        losses.append((loss, *(parameter.grad for parameter in model.parameters())))
    assert all(map(torch.equal, *losses))


def test_alone_a_loss_of_each_row_is_pytorchs_own() -> None:
    logits, targets = torch.randn(2, 3, 7), torch.tensor([[0, 6, -100], [1, 2, 3]])
    loss = vocabulary_parallel_cross_entropy(logits, targets, ALONE, "none")
    assert torch.equal(loss, functional.cross_entropy(logits.movedim(-1, 1), targets, reduction="none"))


def test_alone_the_own_stream_is_the_common_one() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with own_stream(ALONE):
        assert torch.equal(torch.rand(3), expected)


def test_each_rank_keeps_its_part() -> None:
    """The first ranks have one more where it doesn't divide; each block is cut by itself."""
    torch.manual_seed(0)
    whole = nn.Linear(4, 15)
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 15, FIRST_OF_TWO, blocks=3)
    assert torch.equal(layer.weight, whole.weight[[0, 1, 2, 5, 6, 7, 10, 11, 12]])
    assert RowParallelLinear(5, 2, FIRST_OF_TWO).weight.shape == (2, 3)
    assert VocabularyParallelEmbedding(7, 2, FIRST_OF_FOUR).weight.shape == (2, 2)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ParallelAttention(12, 6, FIRST_OF_FOUR), "6 heads can't be shared out over 4 ranks"),
        (lambda: ParallelAttention(10, 4, FIRST_OF_FOUR), "a width of 10 doesn't divide by 4 heads"),
        (lambda: ColumnParallelLinear(4, 10, FIRST_OF_TWO, blocks=3), "10 output features don't divide by 3 blocks"),
        (lambda: ColumnParallelLinear(4, 3, FIRST_OF_FOUR), "3 output features can't be shared out over 4 ranks"),
        (lambda: RowParallelLinear(3, 4, FIRST_OF_FOUR), "3 input features can't be shared out over 4 ranks"),
        (lambda: VocabularyParallelEmbedding(3, 4, FIRST_OF_FOUR), "3 rows of the vocabulary can't be shared out"),
        (
            lambda: vocabulary_parallel_cross_entropy(torch.ones(1, 2), torch.tensor([0]), ALONE, "sum"),
            "there is no reduction 'sum' here",
        ),
    ],
)
def test_sizes_that_cannot_be_shared_out(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()
