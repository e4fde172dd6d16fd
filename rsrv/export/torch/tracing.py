"""How torch.export is run on a module: evaluation mode, flat tensors in and out, and quiet. No JAX here."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch
from torch import nn

from rsrv.export.torch.arguments import Call
from rsrv.export.torch.results import named_results

PREFIX = "module."
"""What `FlatModule` puts before the names of parameters and buffers."""


class FlatModule(nn.Module):
    """`module` with flat tensors in and out: ``forward(*tensors)`` → the tensors of `named_results`.

    torch.export then sees neither keyword arguments nor containers, whose order and types it would have to keep. For a
    TorchScript module, which it refuses, this is also the plain module around it.
    """

    def __init__(self, module: nn.Module, call: Call, output_names: Sequence[str] | None) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._output_names = output_names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named(tensors).values())

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        args, kwargs = self._call.rebuild(tensors)
        return named_results(self.module(*args, **kwargs), self._output_names)


def traced(
    flat: FlatModule, tensors: Sequence[torch.Tensor], dims: Sequence[dict[int, Any]] | None = None
) -> torch.export.ExportedProgram:
    """The graph of `flat`, by running it on stand-ins (non-strict); `dims` name the axes of free size, per tensor.

    To be called within `tracing`.
    """
    shapes = None if dims is None else (tuple(dims),)
    return torch.export.export(flat, tuple(tensors), dynamic_shapes=shapes, strict=False)


@contextmanager
def tracing(module: nn.Module) -> Iterator[None]:
    """What torch.export needs around it: `module` in evaluation mode, no gradients, plain attention, and quiet."""
    with evaluating(module), torch.no_grad(), _quiet(), _plain_attention():
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode; afterwards every part of it is in the mode that it was in."""
    training = [child for child in module.modules() if getattr(child, "training", False)]
    try:
        module.eval()
    except NotImplementedError:  # the module of an exported program is in the mode that it was exported in
        pass
    except RuntimeError as error:
        if not _is_constant_training(error):
            raise
        for child in training:  # eval() gave up at the first part whose mode is a constant of its code
            with suppress(RuntimeError):
                child.training = False
    try:
        yield
    finally:
        for child in training:
            if not child.training:
                child.training = True


def _is_constant_training(error: RuntimeError) -> bool:
    return "Can't set constant 'training'" in str(error)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the fused encoder layer, an operator of its own that nothing else knows."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export warns about its own internals, and prints and logs what it then raises."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export", "torch.fx", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
