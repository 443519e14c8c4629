"""The fused cells of LSTM and GRU, which torch's recurrent layers call on a device and the CPU has no kernel of.

Formulas: those of torch.nn.LSTMCell and torch.nn.GRUCell. In what follows N is the batch and H the hidden size; gates
lie side by side, ``[N, 4 * H]`` (input, forget, cell, output) or ``[N, 3 * H]`` (reset, update, new). Half precision
is computed in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS"]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(gates) if bias is None else _wide(gates) + _wide(bias)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden state and cell state ``[N, H]``, and the gates after their activations, for the gradient."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    read, forget, new, shown = gates.chunk(4, 1)
    read, forget, new, shown = read.sigmoid(), forget.sigmoid(), new.tanh(), shown.sigmoid()
    cy = forget * _wide(cx) + read * new
    hy = shown * cy.tanh()
    workspace = torch.cat([read, forget, new, shown], 1)
    return hy.to(cx.dtype), cy.to(cx.dtype), workspace.to(cx.dtype)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the gates, of the old cell state and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    read, forget, new, shown = _wide(workspace).chunk(4, 1)
    out = _wide(cy).tanh()
    grad_h = torch.zeros_like(out) if grad_hy is None else _wide(grad_hy)
    grad_c = grad_h * shown * (1 - out * out)
    if grad_cy is not None:
        grad_c = grad_c + _wide(grad_cy)
    grads = [
        grad_c * new * read * (1 - read),
        grad_c * _wide(cx) * forget * (1 - forget),
        grad_c * read * (1 - new * new),
        grad_h * out * shown * (1 - shown),
    ]
    grad_gates = torch.cat(grads, 1)
    grad_bias = grad_gates.sum(0).to(cx.dtype) if has_bias else None
    return grad_gates.to(cx.dtype), (grad_c * forget).to(cx.dtype), grad_bias


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden state ``[N, H]``, and what the gradient needs ``[N, 5 * H]``: gates, old state, hidden part of new."""
    input_reset, input_update, input_new = _with_bias(input_gates, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    old = _wide(hx)
    workspace = torch.cat([reset, update, new, old, hidden_new], 1)
    return (new + update * (old - new)).to(hx.dtype), workspace.to(hx.dtype)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of input gates, hidden gates, old state, input bias and hidden bias."""
    reset, update, new, old, hidden_new = _wide(workspace).chunk(5, 1)
    grad = _wide(grad_hy)
    grad_new = grad * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    grad_update = grad * (old - new) * update * (1 - update)
    inputs = torch.cat([grad_reset, grad_update, grad_new], 1)
    hiddens = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    found = [inputs, hiddens, grad * update, *([inputs.sum(0), hiddens.sum(0)] if has_bias else [])]
    rounded = [tensor.to(workspace.dtype) for tensor in found]
    return (*rounded, *([] if has_bias else [None, None]))


CELLS: dict[str, Callable[..., Any]] = {
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""What computes each, with the operator's parameters."""
