"""Recurrent layers on the simulated device: outputs and gradients are the CPU's within rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "lstm, no bias": lambda: nn.LSTM(4, 5, bias=False, batch_first=True),
    "lstm, projected": lambda: nn.LSTM(4, 5, proj_size=3),
    "gru": lambda: nn.GRU(4, 5, 2, bidirectional=True),
    "gru, no bias": lambda: nn.GRU(4, 5, bias=False, batch_first=True),
    "rnn": lambda: nn.RNN(4, 5, 2),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTMCell(4, 5),
    "gru": lambda: nn.GRUCell(4, 5),
    "gru, no bias": lambda: nn.GRUCell(4, 5, bias=False),
}


def differentiated(
    layer: nn.Module, inputs: list[Tensor], function: Callable[..., object] | None = None
) -> list[Tensor]:
    """Outputs without and with gradient, and the gradients of inputs and parameters."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    call = function or (lambda *values: layer(*values))
    with torch.no_grad():
        plain = _pytree.tree_leaves(call(*leaves))
    outputs = _pytree.tree_leaves(call(*leaves))
    weights = [torch.linspace(1, 2, output.numel()).view(output.shape).to(output) for output in outputs]
    sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
    gradients = [leaf.grad for leaf in [*leaves, *layer.parameters()]]
    return [tensor.detach().cpu() for tensor in [*plain, *outputs, *gradients]]


def assert_close(make: Callable[[], nn.Module], inputs: list[Tensor], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    layer = make().to(dtype)
    expected = differentiated(layer, [value.to(dtype) for value in inputs])
    layer.zero_grad()
    got = differentiated(layer.npu(), [value.to("npu", dtype) for value in inputs])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # the CPU's, once
def test_layers(name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert_close(LAYERS[name], [torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))], dtype, tolerance)


@pytest.mark.parametrize("name", CELLS)
def test_cells(name: str) -> None:
    assert_close(CELLS[name], [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))], torch.float32, 1e-5)


@pytest.mark.parametrize("unused", [0, 1], ids=["hidden", "cell"])
def test_a_result_of_the_lstm_cell_may_be_unused(unused: int) -> None:
    torch.manual_seed(1)
    found = []
    cell = nn.LSTMCell(4, 5)
    for device in ("cpu", "npu"):
        cell = cell.to(device)
        cell.zero_grad()
        found.append(differentiated(cell, [torch.ones(3, 4, device=device)], lambda x, cell=cell: cell(x)[1 - unused]))
    for theirs, mine in zip(*found, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")  # torch_npu's empty_like, once
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_have_their_lengths_on_the_host(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    layer = kind(4, 5)
    value = torch.randn(3, 2, 4)

    def packed(x: Tensor) -> Tensor:
        sequence = pack_padded_sequence(x, torch.tensor([2, 3]), enforce_sorted=False)
        assert (sequence.batch_sizes.is_cpu, sequence.batch_sizes.tolist()) == (True, [2, 2, 1])
        output, lengths = pad_packed_sequence(layer(sequence)[0])
        assert (lengths.is_cpu, lengths.tolist()) == (True, [2, 3])
        return output

    expected = differentiated(layer, [value], packed)
    layer.zero_grad()
    layer.npu()
    for mine, theirs in zip(differentiated(layer, [value.npu()], packed), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_cell_has_second_derivatives() -> None:
    for make in CELLS.values():
        found = []
        torch.manual_seed(1)
        cell = make()
        for device in ("cpu", "npu"):
            leaf = torch.linspace(0, 1, 12).view(3, 4).to(device).requires_grad_()
            output = _pytree.tree_leaves(cell.to(device)(leaf))[0]
            (first,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaf)[0].cpu())
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
