"""LSTM, GRU and plain RNN as `lax.scan`: decomposed they are unrolled, one copy of the cell per time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering

Step = Callable[[Any, Any], tuple[Any, Any]]
"""(state, gates of the input at one time) → (new state, what the layer puts out)."""


@lowering(aten.lstm.input, keep=True)
def lstm(
    x: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Any, Any]:
    """x[t,n,i] (or [n,t,i]), hx = (h[layers,n,p], c[layers,n,h]) → y[t,n,p·directions], h, c."""
    h0, c0 = hx

    def cell(weights: Sequence[Any], index: int) -> tuple[Any, Any, Any, Step]:
        w_input, w_hidden, b_input, b_hidden, projection = _cell_weights(weights, has_biases)

        def step(state: Any, gates: Any) -> tuple[Any, Any]:
            h, c = state
            i, f, g, o = jnp.split(gates + h @ w_hidden.T, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            if projection is not None:
                h = h @ projection.T
            return (h, c), h

        return (h0[index], c0[index]), w_input, b_input + b_hidden, step

    y, states = _layers(x, params, num_layers, bidirectional, batch_first, cell)
    return y, jnp.stack([h for h, _ in states]), jnp.stack([c for _, c in states])


@lowering(aten.gru.input, keep=True)
def gru(
    x: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Any]:
    """x[t,n,i] (or [n,t,i]), hx[layers,n,h] → y[t,n,h·directions], h."""

    def cell(weights: Sequence[Any], index: int) -> tuple[Any, Any, Any, Step]:
        w_input, w_hidden, b_input, b_hidden, _ = _cell_weights(weights, has_biases)

        def step(h: Any, gates: Any) -> tuple[Any, Any]:
            r_x, z_x, n_x = jnp.split(gates, 3, -1)
            r_h, z_h, n_h = jnp.split(h @ w_hidden.T + b_hidden, 3, -1)
            z = jax.nn.sigmoid(z_x + z_h)
            n = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_h) * n_h)
            h = (h - n) * z + n
            return h, h

        return hx[index], w_input, b_input, step

    y, states = _layers(x, params, num_layers, bidirectional, batch_first, cell)
    return y, jnp.stack(states)


@lowering(aten.rnn_tanh.input, keep=True)
def rnn_tanh(x: Any, hx: Any, params: Sequence[Any], *options: Any) -> tuple[Any, Any]:
    """As `gru`."""
    return _rnn(jnp.tanh, x, hx, params, *options)


@lowering(aten.rnn_relu.input, keep=True)
def rnn_relu(x: Any, hx: Any, params: Sequence[Any], *options: Any) -> tuple[Any, Any]:
    """As `gru`."""
    return _rnn(jax.nn.relu, x, hx, params, *options)


def _rnn(
    activation: Callable[[Any], Any],
    x: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Any]:
    def cell(weights: Sequence[Any], index: int) -> tuple[Any, Any, Any, Step]:
        w_input, w_hidden, b_input, b_hidden, _ = _cell_weights(weights, has_biases)

        def step(h: Any, gates: Any) -> tuple[Any, Any]:
            h = activation(gates + h @ w_hidden.T)
            return h, h

        return hx[index], w_input, b_input + b_hidden, step

    y, states = _layers(x, params, num_layers, bidirectional, batch_first, cell)
    return y, jnp.stack(states)


def _layers(
    x: Any,
    params: Sequence[Any],
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    cell: Callable[[Sequence[Any], int], tuple[Any, Any, Any, Step]],
) -> tuple[Any, list[Any]]:
    """Run the layers; `cell` makes (first state, input weights, bias, step) from the weights of one direction."""
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    states = []
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            start, w_input, bias, step = cell(params[index * each : (index + 1) * each], index)
            gates = jnp.einsum("tni,gi->tng", x, w_input) + bias  # all times at once: one large product
            last, y = jax.lax.scan(step, start, gates, reverse=bool(direction))
            outs.append(y)
            states.append(last)
        x = jnp.concatenate(outs, -1)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), states


def _cell_weights(weights: Sequence[Any], has_biases: bool) -> tuple[Any, Any, Any, Any, Any]:
    """(input weights, hidden weights, input bias, hidden bias, projection or None)."""
    w_input, w_hidden = weights[:2]
    zero = jnp.zeros(w_input.shape[0], w_input.dtype)
    b_input, b_hidden = weights[2:4] if has_biases else (zero, zero)
    rest = weights[4 if has_biases else 2 :]
    return w_input, w_hidden, b_input, b_hidden, rest[0] if rest else None
