"""Small models, one per family of operators: what `rsrv export torch` has to lower, or to refuse with one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its example inputs; `make` is called with the random state seeded."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


CASES: list[Case] = []


def case(name: str, **kwargs: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Callable[[], tuple[Any, ...]]]:
    def register(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        CASES.append(Case(name, make, kwargs))
        return make

    return register


def function(name: str, *inputs: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of tensors, and how its inputs are made."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(name, lambda: (Function(body), *(make() for make in inputs))))
        return body

    return register


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape).to(dtype)


def uniform(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(shape) + 0.1


def whole(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, high, shape).to(dtype)


def trained(module: nn.Module) -> nn.Module:
    """Random statistics, so that normalisation in evaluation mode does something."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return module


# --- layers -------------------------------------------------------------------------------------------------------


@case("linear and batchnorm1d")
def _() -> Any:
    return trained(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())), torch.randn(3, 6)


@case("conv2d, batchnorm, maxpool")
def _() -> Any:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return trained(net), torch.randn(2, 3, 8, 8)


@case("conv1d, grouped and dilated")
def _() -> Any:
    return nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding=2), torch.randn(2, 4, 12)


@case("conv2d, padding='same' and reflect")
def _() -> Any:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"))
    return net, torch.randn(1, 2, 7, 7)


@case("conv3d")
def _() -> Any:
    return nn.Conv3d(2, 3, 3, stride=2, padding=1), torch.randn(1, 2, 6, 6, 6)


@case("transposed conv2d")
def _() -> Any:
    return nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), torch.randn(1, 4, 5, 5)


@case("transposed conv1d, grouped")
def _() -> Any:
    return nn.ConvTranspose1d(4, 6, 4, stride=2, groups=2, dilation=2), torch.randn(2, 4, 7)


@case("transposed conv3d, grouped")
def _() -> Any:
    return nn.ConvTranspose3d(4, 4, 2, stride=2, groups=4), torch.randn(1, 4, 3, 3, 3)


@case("layernorm and rmsnorm")
def _() -> Any:
    return nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), torch.randn(2, 5, 8)


@case("groupnorm and instancenorm")
def _() -> Any:
    net = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LocalResponseNorm(2))
    return net, torch.randn(2, 4, 5, 5)


@case("embedding, int64")
def _() -> Any:
    return nn.Embedding(10, 4, padding_idx=0), torch.randint(0, 10, (2, 5))


@case("embedding, int32")
def _() -> Any:
    return nn.Embedding(10, 4), torch.randint(0, 10, (2, 5), dtype=torch.int32)


@case("embedding bags")
def _() -> Any:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum = nn.EmbeddingBag(10, 4, mode="sum", padding_idx=1)
            self.mean = nn.EmbeddingBag(10, 4, mode="mean", include_last_offset=True)
            self.max = nn.EmbeddingBag(10, 4, mode="max")

        def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            offsets = torch.tensor([0, 2, 2, 5])
            flat = ids.reshape(-1)
            return (
                self.sum(flat, offsets, per_sample_weights=weights),
                self.mean(flat, torch.tensor([0, 2, 2, 8])),
                self.max(flat, offsets),
                self.max(ids),
            )

    return Bags(), torch.randint(0, 10, (2, 4)), torch.rand(8)


@case("multihead attention")
def _() -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
            return self.inner(x, x, x, key_padding_mask=padding)

    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return Attention(), torch.randn(2, 5, 8), padding


@function("attention, float mask", normal(2, 2, 5, 4), normal(2, 2, 6, 4), normal(2, 2, 6, 3), normal(5, 6))
def _(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.7)


@function("attention, boolean mask with an empty row", normal(1, 2, 4, 4), normal(1, 2, 4, 4), normal(1, 2, 4, 4))
def _(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@function("attention, causal", normal(2, 2, 5, 4), normal(2, 2, 7, 4), normal(2, 2, 7, 4))
def _(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@function("attention, grouped queries", normal(1, 4, 5, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4))
def _(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@case("transformer encoder")
def _() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8)


@case("transformer decoder")
def _() -> Any:
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8), torch.randn(2, 5, 8)


class Recurrent(nn.Module):
    """An LSTM with all of its results in one tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        y, (h, c) = self.inner(x)
        return y, h, c


@case("lstm, two layers, both directions")
def _() -> Any:
    return Recurrent(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, dropout=0.5)), torch.randn(2, 6, 4)


@case("lstm with projection, without bias")
def _() -> Any:
    return Recurrent(nn.LSTM(4, 6, proj_size=3, bias=False)), torch.randn(6, 2, 4)


@case("gru with initial state")
def _() -> Any:
    return nn.GRU(4, 5, 2), torch.randn(6, 2, 4), torch.randn(2, 2, 5)


@case("lstm and gru cells")
def _() -> Any:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTMCell(4, 5), nn.GRUCell(4, 5)

        def forward(self, x: torch.Tensor) -> Any:
            h, c = self.lstm(x)
            return h, c, self.gru(x, h)

    return Cells(), torch.randn(2, 4)


@case("rnn, tanh and relu")
def _() -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.RNN(4, 5, batch_first=True), nn.RNN(5, 3, nonlinearity="relu", batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            y, _ = self.a(x)
            return self.b(y)

    return Both(), torch.randn(2, 6, 4)


# --- resizing, pooling, sampling ----------------------------------------------------------------------------------


@function("resize, nearest", normal(1, 2, 4, 5))
def _(x: Any) -> Any:
    return F.interpolate(x, scale_factor=2), F.interpolate(x, size=(3, 7), mode="nearest-exact")


@function("resize, bilinear", normal(1, 2, 4, 5))
def _(x: Any) -> Any:
    return F.interpolate(x, size=(7, 9), mode="bilinear")


@function("resize, bicubic", normal(1, 2, 4, 5))
def _(x: Any) -> Any:
    return F.interpolate(x, size=(7, 9), mode="bicubic")


@function("resize, bilinear antialiased", normal(1, 2, 9, 8))
def _(x: Any) -> Any:
    return F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True)


@function("resize, bicubic antialiased", normal(1, 2, 9, 8))
def _(x: Any) -> Any:
    return F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True)


@function("resize, bilinear with aligned corners", normal(1, 2, 4, 5))
def _(x: Any) -> Any:
    return F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True)


@function("resize, linear and trilinear", normal(1, 2, 5), normal(1, 1, 3, 4, 5))
def _(x: Any, y: Any) -> Any:
    return F.interpolate(x, size=9, mode="linear"), F.interpolate(y, scale_factor=2, mode="trilinear")


@function("adaptive average pool, to one", normal(1, 2, 6, 7))
def _(x: Any) -> Any:
    return F.adaptive_avg_pool2d(x, 1)


@function("adaptive average pool, uneven", normal(1, 2, 7, 5), normal(1, 2, 7))
def _(x: Any, y: Any) -> Any:
    return F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool1d(y, 3)


@function("adaptive max pool", normal(1, 2, 6, 4), normal(1, 2, 6))
def _(x: Any, y: Any) -> Any:
    return F.adaptive_max_pool2d(x, (3, 2)), F.adaptive_max_pool1d(y, 2)


@function("adaptive max pool, uneven, with indices", normal(1, 2, 7, 5))
def _(x: Any) -> Any:
    return F.adaptive_max_pool2d(x, (3, 2), return_indices=True)


@function("average pool, ceil, without padding", normal(1, 2, 7, 5))
def _(x: Any) -> Any:
    return F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False)


@function("max pool with indices", normal(1, 2, 6, 6))
def _(x: Any) -> Any:
    return F.max_pool2d(x, 3, 2, padding=1, return_indices=True)


@function("max pool, ceil, dilated", normal(1, 2, 8, 7))
def _(x: Any) -> Any:
    return F.max_pool2d(x, 2, 2, ceil_mode=True), F.max_pool2d(x, 2, 1, dilation=2)


@function("max pool 1d and 3d", normal(1, 2, 7), normal(1, 1, 4, 4, 4))
def _(x: Any, y: Any) -> Any:
    return F.max_pool1d(x, 3, 2), F.max_pool3d(y, 2)


@function("max unpool and lp pool", normal(1, 2, 4, 4))
def _(x: Any) -> Any:
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, indices, 2), F.lp_pool2d(x.abs(), 2, 2)


@function("grid sample", normal(1, 2, 5, 6), lambda: torch.rand(1, 3, 4, 2) * 2.4 - 1.2)
def _(x: Any, grid: Any) -> Any:
    return (
        F.grid_sample(x, grid, align_corners=False),
        F.grid_sample(x, grid, padding_mode="border", align_corners=True),
    )


@function("affine grid", normal(1, 2, 3))
def _(theta: Any) -> Any:
    return F.affine_grid(theta, [1, 1, 4, 5], align_corners=False)


# --- tensors ------------------------------------------------------------------------------------------------------


@function("einsum", normal(2, 3, 4), normal(2, 4, 5))
def _(x: Any, y: Any) -> Any:
    return torch.einsum("bij,bjk->bik", x, y), torch.einsum("bij->bj", x), torch.tensordot(x, y, ([0, 2], [0, 1]))


@function("topk", normal(3, 7))
def _(x: Any) -> Any:
    return torch.topk(x, 3)


@function("topk, first axis, smallest", normal(7, 3))
def _(x: Any) -> Any:
    return torch.topk(x, 2, dim=0, largest=False)


@function("sort and argsort", normal(3, 6))
def _(x: Any) -> Any:
    values, indices = torch.sort(x, descending=True)
    return values, indices, torch.argsort(x, dim=0), torch.kthvalue(x, 2).values


@function("argmax, max and min", normal(3, 6))
def _(x: Any) -> Any:
    low, high = torch.aminmax(x)
    return x.argmax(1), *x.max(1), x.min(0).values, x.argmin(), low, high, x.amax((0, 1))


@function("gather and scatter", normal(3, 6), whole(6, 3, 2), normal(3, 2))
def _(x: Any, index: Any, source: Any) -> Any:
    return x.gather(1, index), torch.zeros_like(x).scatter_add(1, index, source), torch.take_along_dim(x, index, 1)


@function("scatter and scatter_reduce", normal(3, 6), lambda: torch.tensor([[0, 4], [1, 2], [5, 3]]), normal(3, 2))
def _(x: Any, index: Any, source: Any) -> Any:
    return (
        x.scatter(1, index, source),
        x.scatter(1, index, 2.5),
        x.scatter_reduce(1, index, source, "amax"),
        x.scatter_reduce(1, index, source, "sum", include_self=False),
    )


@function("index_add, index_select, index_copy", normal(5, 3), lambda: torch.tensor([4, 0]), normal(2, 3))
def _(x: Any, index: Any, source: Any) -> Any:
    return x.index_add(0, index, source, alpha=2), x.index_select(1, index % 3), x.index_copy(0, index, source)


@function("assignment to indices and slices", normal(4, 5), lambda: torch.tensor([3, 1]))
def _(x: Any, index: Any) -> Any:
    y = x.clone()
    y[index] = 7.0
    y[:, 1:3] = x[:, :2] * 2
    y[x > 1] = -1.0
    y[0, 0] += 1
    return y


@function("indexing", normal(4, 5, 6), lambda: torch.tensor([3, 1]))
def _(x: Any, index: Any) -> Any:
    return x[index], x[:, index, index], x[..., None, 2:5:2], x[index, :, index], x[-1], x.select(1, 2)


@function("where and masked_fill", normal(3, 4), normal(3, 4))
def _(x: Any, y: Any) -> Any:
    return torch.where(x > 0, x, y), x.masked_fill(y > 0, float("-inf")).softmax(1), torch.where(x > 0, x, 0.0)


@function("cumsum, cumprod, logcumsumexp", normal(3, 4))
def _(x: Any) -> Any:
    return x.cumsum(1), x.cumprod(0), x.logcumsumexp(1)


@function("cummax and diff", normal(3, 6))
def _(x: Any) -> Any:
    return *x.cummax(1), *x.cummin(1), x.diff(dim=1)


@function("padding in four modes", normal(1, 2, 4, 5))
def _(x: Any) -> Any:
    return tuple(F.pad(x, (1, 2, 2, 1), mode) for mode in ("constant", "reflect", "replicate", "circular"))


@function("roll, flip, rot90", normal(2, 3, 4))
def _(x: Any) -> Any:
    return x.roll((1, -2), (1, 2)), x.flip(0, 2), x.rot90(1, (1, 2)), x.movedim(0, 2), x.permute(2, 0, 1)


@function("tril, triu, eye, arange, linspace", normal(4, 5))
def _(x: Any) -> Any:
    return x.tril(1), x.triu(-1), x @ torch.eye(5), x + torch.arange(5), x * torch.linspace(0, 1, 5), x.diagonal()


@function("repeat, expand, tile, meshgrid", normal(2, 3))
def _(x: Any) -> Any:
    a, b = torch.meshgrid(x[0], x[1], indexing="ij")
    return x.repeat_interleave(2, 1), x.repeat(2, 1, 2), x[:, None].expand(-1, 4, -1), x.tile(2), a, b


@function("cat, stack, split, chunk, unbind", normal(4, 6))
def _(x: Any) -> Any:
    a, b = x.chunk(2, 1)
    c, d = x.split([1, 3])
    return torch.cat([b, a], 1), torch.stack(x.unbind(1)), c, d, torch.hstack([a, b]), torch.block_diag(c, d)


@function("unfold and fold", normal(1, 2, 6, 6))
def _(x: Any) -> Any:
    columns = F.unfold(x, 3, padding=1, stride=2)
    return columns, F.fold(columns, (6, 6), 3, padding=1, stride=2), x.unfold(2, 3, 2)


@function("pixel shuffle, channel shuffle", normal(1, 8, 4, 4))
def _(x: Any) -> Any:
    return F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)


@case("upsample and conv")
def _() -> Any:
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 3, 3)), torch.randn(1, 2, 4, 4)


# --- signals, numbers, linear algebra -----------------------------------------------------------------------------


@function("rfft and irfft", normal(2, 8))
def _(x: Any) -> Any:
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum * 2, n=8), spectrum.abs(), torch.view_as_real(spectrum)


@function("fft2, real view", normal(2, 4, 6))
def _(x: Any) -> Any:
    return torch.view_as_real(torch.fft.fft2(x)), torch.fft.fftshift(torch.fft.ifft2(torch.fft.fft2(x)).real)


@case("stft")
def _() -> Any:
    class Spectrogram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(16))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.stft(x, 16, 4, window=self.window, return_complex=True).abs().pow(2)

    return Spectrogram(), torch.randn(2, 64)


@case("complex rotary embedding")
def _() -> Any:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turns", torch.polar(torch.ones(5, 4), torch.rand(5, 4)), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            pairs = torch.view_as_complex(x.reshape(2, 5, 4, 2))
            return torch.view_as_real(pairs * self.turns).flatten(2)

    return Rotary(), torch.randn(2, 5, 8)


@function("norm, normalize, cosine", normal(3, 5), normal(3, 5))
def _(x: Any, y: Any) -> Any:
    return x.norm(dim=1), F.normalize(x), F.cosine_similarity(x, y), torch.linalg.vector_norm(x, 1), x.norm(p=3)


@function("std, var, median, quantile", normal(3, 7))
def _(x: Any) -> Any:
    return x.std(1), x.var(0, unbiased=False), x.median(1).values, x.quantile(0.3, dim=1), *torch.std_mean(x, 1)


@function("cdist, logsumexp, softplus", normal(3, 5), normal(4, 5))
def _(x: Any, y: Any) -> Any:
    return torch.cdist(x, y), x.logsumexp(1), F.softplus(x), F.pairwise_distance(x, y[:3])


@function("activations", normal(3, 7))
def _(x: Any) -> Any:
    names = "gelu silu mish hardswish hardsigmoid elu selu celu softsign logsigmoid relu6 tanhshrink leaky_relu glu"
    return tuple(getattr(F, name)(x[:, :6]) for name in names.split())


@function("more activations", normal(3, 6))
def _(x: Any) -> Any:
    return (
        F.gelu(x, approximate="tanh"),
        F.softmax(x, 1),
        F.log_softmax(x, 0),
        F.hardtanh(x, -0.5, 0.5),
        F.threshold(x, 0.1, 2.0),
        F.softshrink(x),
        F.hardshrink(x),
        F.softmin(x, 1),
        F.prelu(x, torch.tensor(0.3)),
    )


@function("elementary functions", uniform(3, 5))
def _(x: Any) -> Any:
    names = "exp log sqrt rsqrt sin cos tan asin atan sinh tanh erf expm1 log1p log2 reciprocal sign floor ceil frac"
    y = x / 2
    return tuple(getattr(y, name)() for name in names.split())


@function("more elementary functions", uniform(3, 5), normal(3, 5))
def _(x: Any, y: Any) -> Any:
    return (
        torch.atan2(y, x),
        torch.hypot(x, y),
        torch.lerp(x, y, 0.3),
        torch.addcmul(x, x, y, value=0.5),
        torch.fmod(y, x),
        torch.remainder(y, x),
        torch.lgamma(x),
        torch.digamma(x + 1),
        torch.erfinv(y.tanh()),
        torch.special.i0(x),
        torch.logit(x.clamp(0.1, 0.9)),
        torch.nan_to_num(y / 0.0),
        torch.clamp(y, min=x),
        x**y,
        torch.round(y, decimals=1),
    )


@function("matrix products", normal(2, 3, 4), normal(2, 4, 3), normal(3))
def _(x: Any, y: Any, b: Any) -> Any:
    return x @ y, torch.baddbmm(x @ y, x, y, beta=0.5), torch.addmm(b, x[0], y[0]), x[0] @ y[0] @ b, torch.outer(b, b)


@function("inverse, solve, cholesky", normal(2, 4, 4), normal(2, 4, 3))
def _(x: Any, y: Any) -> Any:
    a = x @ x.mT + 4 * torch.eye(4)
    return torch.linalg.inv(a), torch.linalg.solve(a, y), torch.linalg.cholesky(a), torch.linalg.det(a)


@function("svd, eigh, qr", normal(4, 3))
def _(x: Any) -> Any:
    a = x.T @ x
    q, r = torch.linalg.qr(x)
    return torch.linalg.svdvals(x), torch.linalg.eigvalsh(a), q @ r, torch.linalg.pinv(x), torch.linalg.matrix_norm(x)


@function("integer arithmetic", whole(50, 3, 4), lambda: torch.randint(1, 7, (3, 4)))
def _(x: Any, y: Any) -> Any:
    return (
        (x - 25) // y,
        (x - 25) % y,
        torch.div(x - 25, y, rounding_mode="trunc"),
        x << 2,
        x >> 1,
        x & y,
        x | y,
        x ^ y,
        ~x,
        x / y,
        x.sum(),
        x.float().mean(0),
        x.prod(1),
        torch.gcd(x, y),
        x.bitwise_not(),
    )


@function("large integers stay exact", lambda: torch.tensor([2**40 + 1, -(2**41)]))
def _(x: Any) -> Any:
    return x + 2**33, x * 3, (x % 1000).to(torch.int32), x.sum()


@function(
    "booleans and bytes", lambda: torch.tensor([[True, False], [True, True]]), whole(256, 2, 2, dtype=torch.uint8)
)
def _(flag: Any, image: Any) -> Any:
    pixels = image.to(torch.uint8)
    return flag & (pixels > 100), flag.any(), flag.all(1), pixels.float() / 255, pixels + 3, flag.sum(), ~flag


@function("one_hot, isin, bucketize", whole(5, 2, 3), normal(2, 3))
def _(x: Any, y: Any) -> Any:
    edges = torch.tensor([-1.0, 0.0, 1.0])
    return F.one_hot(x, 5), torch.isin(x, torch.tensor([1, 3])), torch.bucketize(y, edges), torch.searchsorted(edges, y)


@function("comparisons and logic", normal(3, 4), normal(3, 4))
def _(x: Any, y: Any) -> Any:
    return x < y, x.ge(0), torch.isclose(x, y), torch.logical_xor(x > 0, y > 0), torch.isnan(x), x.maximum(y), x.eq(x)


@function("histogram of integers by comparison", whole(4, 6))
def _(x: Any) -> Any:
    return (x[:, None] == torch.arange(4)).sum(0)


# --- forms of models ----------------------------------------------------------------------------------------------


@case("dropout in evaluation")
def _() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Linear(4, 2)), torch.randn(2, 4)


class Named(nn.Module):
    def forward(self, a: Any, b: Any, *, scale: Any, shift: Any = None) -> Any:
        y = (a - b) * scale
        return y if shift is None else y + shift


@case("keyword arguments", scale=torch.tensor([2.0, 3.0]))
def _() -> Any:
    return Named(), torch.randn(3, 2), torch.randn(3, 2)


@case("keyword arguments in another order", shift=torch.tensor([0.5, 1.0]), scale=torch.tensor([2.0, 3.0]))
def _() -> Any:
    return Named(), torch.randn(3, 2), torch.randn(3, 2)


@case("containers of inputs, a dict of outputs")
def _() -> Any:
    class Model(nn.Module):
        def forward(self, pair: Any, options: Any) -> Any:
            return {"sum": pair[0] + pair[1], "scaled": options["x"] * options["factor"], "none": None}

    return Model(), (torch.randn(2), torch.randn(2)), {"x": torch.randn(3), "factor": 2.5}


@case("python numbers as arguments")
def _() -> Any:
    class Model(nn.Module):
        def forward(self, x: Any, times: int, factor: float = 0.1, mode: str = "sum") -> Any:
            return getattr(x * factor, mode)() + times

    return Model(), torch.randn(3), 4


@case("None among the outputs, an input passed through")
def _() -> Any:
    return Function(lambda x: (x, None, x * 2)), torch.randn(3)


@case("an output that is constant")
def _() -> Any:
    return Function(lambda x: (x + 1, torch.arange(4).float())), torch.randn(3)


@case("bfloat16")
def _() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).bfloat16(), torch.randn(2, 8).bfloat16()


@case("float16")
def _() -> Any:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()).half(), torch.randn(1, 2, 6, 6).half()


@case("float64")
def _() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double(), torch.randn(2, 8).double()


@case("autocast to bfloat16")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(x)

    return Model(), torch.randn(2, 8)


@case("float8 weights")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(4, 8).to(torch.float8_e4m3fn))

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.weight.to(torch.float32).T

    return Model(), torch.randn(2, 8)


@case("int8 weights, dequantised")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (4, 8), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(4, 1))

        def forward(self, x: torch.Tensor) -> Any:
            steps = torch.clamp(torch.round(x * 20), -128, 127).to(torch.int8)
            return steps.float() @ (self.weight.float() * self.scale).T

    return Model(), torch.randn(2, 8)


@case("weight norm")
def _() -> Any:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)


@case("spectral norm")
def _() -> Any:
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), torch.randn(2, 4)


@case("tied and unused weights")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unused, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.embed(ids).mean(1))

    return Model(), torch.randint(0, 6, (2, 3))


@case("torch.cond")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: self.down(x) - 1, (x,))

    return Model(), torch.randn(2, 3)


@case("while_loop")
def _() -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    def forward(x: torch.Tensor) -> Any:
        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, y * 1.5), (start, x))[1]

    return Function(forward), torch.randn(2, 3)


@function("losses", normal(4, 5), whole(5, 4))
def _(x: Any, target: Any) -> Any:
    return F.cross_entropy(x, target, label_smoothing=0.1), F.nll_loss(x.log_softmax(1), target), F.mse_loss(x, x * 2)


@function("more losses", normal(4, 5), uniform(4, 5))
def _(x: Any, y: Any) -> Any:
    return (
        F.binary_cross_entropy_with_logits(x, y.clamp(max=1)),
        F.smooth_l1_loss(x, y),
        F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        F.huber_loss(x, y),
    )


@case("a buffer that forward overwrites")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            self.calls.add_(1)
            return x * 2

    return Model(), torch.randn(3)


@case("in-place operations on views")
def _() -> Any:
    def forward(x: torch.Tensor) -> Any:
        y = x.clone()
        y[0].mul_(2)
        y.view(-1)[3:5].add_(1)
        return y.relu_()

    return Function(forward), torch.randn(3, 4)


@case("a number taken out of a tensor")
def _() -> Any:
    return Function(lambda x: x * x.max().item()), torch.randn(3)
