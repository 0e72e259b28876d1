"""What each rank of test_parallel_tensor.py runs: layers that ranks share against the same in one process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import pytest
import torch
from parallel_tensor_twins import Attention, Model, mlp
from torch import nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.parallel import groups as parallel_groups
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Group, ProcessSets
from hvdtrain.parallel.torch.collectives import all_gather, all_reduce, gather, own_part, scatter
from hvdtrain.parallel.torch.cuts import cut_of, part_of
from hvdtrain.parallel.torch.streams import own_stream
from hvdtrain.parallel.torch.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)

Make = Callable[[], nn.Module]


def near(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def own(whole: torch.Tensor, parameter: nn.Parameter, group: Group) -> torch.Tensor:
    cut = cut_of(parameter)
    return whole if cut is None else part_of(whole, cut, group.size, group.rank)


def made_alike(plain: Make, shared: Make, group: Group) -> tuple[nn.Module, nn.Module]:
    """Both from the same seed: the same names, the same values, the same random numbers used up."""
    torch.manual_seed(5)
    twin, after_twin = plain(), torch.rand(3)
    torch.manual_seed(5)
    layer, after_layer = shared(), torch.rand(3)
    assert torch.equal(after_twin, after_layer)
    assert list(twin.state_dict()) == list(layer.state_dict())
    for whole, part in zip(twin.parameters(), layer.parameters(), strict=True):
        assert torch.equal(own(whole.detach(), part, group), part)
    return twin, layer


def same_gradients(twin: nn.Module, layer: nn.Module, group: Group) -> None:
    for whole, part in zip(twin.parameters(), layer.parameters(), strict=True):
        assert whole.grad is not None
        near(part.grad, own(whole.grad, part, group))


def layer_is_its_twin(plain: Make, shared: Make, inputs: torch.Tensor, group: Group) -> nn.Module:
    twin, layer = made_alike(plain, shared, group)
    if not inputs.is_floating_point():
        expected, output = twin(inputs), layer(inputs)
        gradient = torch.randn_like(expected)
    else:
        given = [inputs.clone().requires_grad_() for _ in range(2)]
        expected, output = twin(given[0]), layer(given[1])
        gradient = torch.randn_like(expected)
    near(output, expected)
    expected.backward(gradient)
    output.backward(gradient)
    if inputs.is_floating_point():
        near(given[1].grad, given[0].grad)
    same_gradients(twin, layer, group)
    return layer


def layers(group: Group) -> None:
    inputs = torch.randn(3, 5, 8)
    for out_features, blocks in ((8, 1), (11, 1), (15, 3)):
        layer_is_its_twin(
            lambda out=out_features: nn.Linear(8, out),
            lambda out=out_features, blocks=blocks: ColumnParallelLinear(
                8, out, group, blocks=blocks, gather_output=True
            ),
            inputs,
            group,
        )
    for vectors in (inputs, inputs[0], inputs[0, 0], inputs.transpose(0, 1)):
        layer_is_its_twin(
            lambda: nn.Sequential(nn.Linear(8, 10, bias=False), nn.Tanh(), nn.Linear(10, 6, bias=False)),
            lambda: nn.Sequential(
                ColumnParallelLinear(8, 10, group, bias=False), nn.Tanh(), RowParallelLinear(10, 6, group, bias=False)
            ),
            vectors,
            group,
        )
    tokens = torch.randint(11, (3, 5))
    layer_is_its_twin(lambda: nn.Embedding(11, 4), lambda: VocabularyParallelEmbedding(11, 4, group), tokens, group)
    layer_is_its_twin(lambda: mlp(8, 10), lambda: ParallelMLP(8, 10, group), inputs, group)
    for causal in (True, False):
        layer_is_its_twin(
            lambda causal=causal: Attention(8, 4, causal),
            lambda causal=causal: ParallelAttention(8, 4, group, causal=causal),
            inputs,
            group,
        )


def no_token_is_lost(group: Group) -> None:
    """A token that isn't in the table is PyTorch's own error on a rank, and not a vector of zeros."""
    table = VocabularyParallelEmbedding(11, 4, Group("tensor", (0, 1), group.rank % 2, None))
    wrong = torch.tensor([-1 if group.rank % 2 == 0 else 11])
    try:
        table(wrong)
    except IndexError:
        return
    raise AssertionError("no error")


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the sums that are begun."""
    begin, names = hvd.allreduce_async_, []

    def noted(*arguments: object, **options: object) -> object:
        names.append(str(options["name"]))
        return begin(*arguments, **options)

    hvd.allreduce_async_ = noted
    try:
        yield names
    finally:
        hvd.allreduce_async_ = begin


def one_sum_each_way(group: Group) -> None:
    inputs = torch.randn(2, 3, 8, requires_grad=True)
    for layer in (ParallelAttention(8, 4, group), ParallelMLP(8, 12, group)):
        with counted() as names:
            output = layer(inputs)
            assert len(names) == 1, names
            output.sum().backward()
            assert len(names) == 2, names
    with counted() as names:
        layer(inputs.detach()).sum().backward()
        assert len(names) == 1, "the gradient of an input that needs none was summed"


def losses(group: Group) -> None:
    for width in (12, 11):  # evenly and not
        for scale in (1.0, 1e4):
            logits = scale * torch.randn(4, 5, width)
            logits[0, 0, 1] = -torch.inf
            logits[0, 1, : width // group.size] = -torch.inf  # a whole part
            targets = torch.randint(width - 1, (4, 5)) + 1
            targets[0, 0] = 0
            targets[2, 2] = -100
            for reduction in ("none", "mean"):
                one_loss(logits, targets, group, reduction)


def one_loss(logits: torch.Tensor, targets: torch.Tensor, group: Group, reduction: str) -> None:
    whole = logits.clone().requires_grad_()
    part = own_part(logits, group).clone().requires_grad_()
    expected = functional.cross_entropy(whole.movedim(-1, 1), targets, reduction=reduction)
    loss = vocabulary_parallel_cross_entropy(part, targets, group, reduction)
    near(loss, expected)
    weights = torch.rand_like(expected)
    (expected * weights).sum().backward()
    (loss * weights).sum().backward()
    near(part.grad, own_part(whole.grad, group))


def losses_of_short_numbers(group: Group) -> None:
    logits, targets = 10 * torch.randn(7, 12), torch.randint(12, (7,))
    part = own_part(logits.bfloat16(), group).clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(part, targets, group)
    expected = functional.cross_entropy(logits.bfloat16().double(), targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert part.grad is not None
    assert part.grad.dtype == torch.bfloat16


def a_wrong_target_is_told(group: Group) -> None:
    with pytest.raises(UsageError, match="target 12 isn't in a vocabulary of 12"):
        vocabulary_parallel_cross_entropy(own_part(torch.randn(2, 12), group), torch.tensor([3, 12]), group)


def carried(group: Group) -> None:
    """Parts of uneven sizes and of any type, and their gradients."""
    whole = torch.randn(3, 7, 2)
    for dim in (0, 1, -1):
        if whole.shape[dim] < group.size:
            continue
        part = own_part(whole, group, dim).clone().requires_grad_()
        gathered = gather(part, group, dim)
        assert torch.equal(gathered, whole)
        (gathered * whole).sum().backward()
        assert torch.equal(part.grad, own_part(whole, group, dim))
        source = whole.clone().requires_grad_()
        scattered = scatter(source, group, dim)
        assert torch.equal(scattered, part)
        (scattered * part.detach()).sum().backward()
        assert torch.equal(source.grad, whole)
    short = torch.full((2, 3), group.rank + 0.5, dtype=torch.bfloat16)
    assert torch.equal(all_gather(short, group, 0)[::2, 0], (torch.arange(group.size) + 0.5).bfloat16())
    assert all_reduce(short, group).dtype == torch.bfloat16
    assert float(all_reduce(short, group)[0, 0]) == sum(rank + 0.5 for rank in range(group.size))
    assert float(short[0, 0]) == group.rank + 0.5


def mixed_precision(group: Group) -> None:
    torch.manual_seed(2)
    twin = mlp(16, 32).float()
    torch.manual_seed(2)
    layer = ParallelMLP(16, 32, group).float()
    inputs = torch.randn(6, 16, dtype=torch.float32)
    results = []
    for model in (twin, layer):
        given = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(given)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        results.append((output, given.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    for part in layer.parameters():
        assert part.grad is not None
        assert part.grad.dtype == torch.float32


def alike(value: torch.Tensor, group: Group) -> bool:
    every = all_gather(value.unsqueeze(0).double(), group, 0)
    return all(torch.equal(every[0], other) for other in every[1:])


def all_differ(value: torch.Tensor, group: Group) -> bool:
    every = all_gather(value.unsqueeze(0).double(), group, 0)
    return all(not torch.equal(every[a], every[b]) for a in range(group.size) for b in range(a))


def streams(group: Group) -> None:
    def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        before = torch.rand(9)
        with own_stream(group):
            first = torch.rand(9)
        with own_stream(group):
            second = torch.rand(9)
        return before, first, second, torch.rand(9)

    torch.manual_seed(8)
    before, first, second, after = drawn()
    assert alike(before, group)
    assert all_differ(first, group)
    assert all_differ(second, group)
    assert alike(after, group)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    later = drawn()
    assert not torch.equal(later[1], first)
    torch.set_rng_state(state)
    assert all(map(torch.equal, drawn(), later)), "a saved state doesn't bring the own stream back"
    torch.manual_seed(8)
    assert torch.equal(drawn()[1], first)
    try:
        with own_stream(group):
            raise KeyError
    except KeyError:
        assert alike(torch.rand(9), group)


def layers_drop(group: Group) -> None:
    """Cut activations differently on each rank, whole ones alike, and none in evaluation."""
    torch.manual_seed(4)
    model = nn.Sequential(ParallelMLP(8, 64, group, activation=nn.Identity, dropout=0.5), nn.Dropout(0.5))
    hidden: list[torch.Tensor] = []
    model[0].down.register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
    output = model(torch.ones(2, 8))
    assert all_differ((hidden[0] == 0)[:, : 64 // group.size], group)
    assert 0.2 < float((hidden[0] == 0).double().mean()) < 0.8
    assert alike(output, group)

    attention = ParallelAttention(8, 4, group, dropout=0.5, causal=False)
    for part in (attention.qkv.weight, attention.qkv.bias):  # all weights 1/64, all values 1
        nn.init.zeros_(part)
    nn.init.ones_(attention.qkv.bias)
    mixed: list[torch.Tensor] = []
    attention.out.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    assert alike(attention(torch.ones(1, 64, 8)), group)
    assert all_differ(mixed[0], group)

    model.eval()
    attention.eval()
    state = torch.get_rng_state()
    model(torch.ones(2, 8))
    attention(torch.ones(1, 64, 8))
    assert torch.equal(torch.get_rng_state(), state)


def training(grid: Grid) -> None:
    """A small language model with tied embeddings, tensor x data, against one process with all samples."""
    groups = ProcessSets(grid).groups(hvd.rank()) if grid.tensor == hvd.size() else HERE
    group = groups.tensor
    twin, model = made_alike(lambda: Model(None), lambda: Model(group), group)
    optimizers = [torch.optim.SGD(each.parameters(), 0.3, momentum=0.9) for each in (twin, model)]
    for step in range(4):
        tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))
        share = tokens.chunk(groups.data.size)[groups.data.rank]
        expected, loss = twin.loss(tokens), model.loss(share)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.backward()
        loss.backward()
        for part in model.parameters():
            part.grad = all_reduce(part.grad, groups.data) / groups.data.size
        near(all_reduce(loss.detach(), groups.data) / groups.data.size, expected.detach())
        same_gradients(twin, model, group)
        for optimizer in optimizers:
            optimizer.step()
    again = copy.deepcopy(model).loss(share)
    near(again, model.loss(share))


HERE = parallel_groups.init(hvd, Grid(tensor=2, data=2))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    for grid in (Grid(tensor=2, data=2), Grid(tensor=4)):
        group = HERE.tensor if grid.tensor == 2 else ProcessSets(grid).groups(hvd.rank()).tensor
        assert group.size == grid.tensor
        for case in (
            layers, no_token_is_lost, one_sum_each_way, losses, losses_of_short_numbers, a_wrong_target_is_told,
            carried, mixed_precision, streams, layers_drop,
        ):  # fmt: skip
            case(group)
            print("CASE", case.__name__, flush=True)
        training(grid)
    hvd.barrier()
    sys.stdout.write(f"RANK {hvd.rank()} DONE\n")


if __name__ == "__main__":
    main()
