"""A PyTorch model as a function of named tensors, to be run eagerly and to be exported."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch
from torch import nn

from rsrv.core.errors import ExportError, RsrvError
from rsrv.export.torch.arguments import Call
from rsrv.export.torch.graph import Graph, decompose
from rsrv.export.torch.refusals import explain
from rsrv.export.torch.results import named_results
from rsrv.export.usercode import describe, user_code

log = logging.getLogger(__name__)

_PREFIX = "module."


class FlatModule(nn.Module):
    """`module` with flat tensors in and out: ``forward(*tensors)`` → the tensors of `named_results`.

    torch.export then sees neither keyword arguments nor containers, whose order and types it would have to keep.
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


class TorchModel:
    """A module with its example call.

    Args:
        module: any nn.Module; it is run and exported in evaluation mode and left as it was.
        facts: further provenance.
    """

    can_be_dynamic = True

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        output_names: Sequence[str] | None,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.call = call
        self.facts = dict(facts or {})
        self._output_names = output_names
        self._flat = FlatModule(module, call, output_names)

    def weight_names(self) -> list[str]:
        """Parameters and buffers in the order in which the modules declare them, depth first (X-15)."""
        return [
            f"{path}.{name}" if path else name
            for path, child in self.module.named_modules(remove_duplicate=False)
            for tensors in (child.named_parameters(recurse=False), child.named_buffers(recurse=False))
            for name, _ in tensors
        ]

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Eager PyTorch's own answer. Raises ExportError with the user's frames when the model fails."""
        shapes = ", ".join(f"{name}{list(t.shape)}" for name, t in zip(self.call.names, tensors, strict=True))
        with evaluating(self.module), torch.no_grad(), user_code(f"running the model for {shapes}"):
            return self._flat.named([tensor.clone() for tensor in tensors])

    def export(self, tensors: Sequence[torch.Tensor]) -> Graph:
        """The graph for exactly these shapes. Raises ExportError."""
        try:
            return self._export(tensors, None)
        except RsrvError:
            raise
        except Exception as error:
            raise (explain(error) or self._failed(error)) from error

    def export_dynamic(self, tensors: Sequence[torch.Tensor], axes: Sequence[int], largest: int) -> Graph | None:
        """One graph for every batch size from 1 to `largest`, or None when torch.export fixes the size somewhere.

        `tensors` have a batch of 2 rows or more along their `axes`.
        """
        if not self.can_be_dynamic:
            return None
        batch = torch.export.Dim("batch", min=1, max=max(2, largest))
        try:
            return self._export(tensors, [{axis: batch} for axis in axes])
        except Exception as error:
            log.info("no dynamic batch, exporting every batch size for itself why=%s", str(error).partition("\n")[0])
            return None

    def _export(self, tensors: Sequence[torch.Tensor], dims: list[dict[int, Any]] | None) -> Graph:
        shapes = None if dims is None else (tuple(dims),)
        with evaluating(self.module), torch.no_grad(), _quiet(), _plain_attention():
            flat = FlatModule(self._traceable(tensors), self.call, self._output_names)
            program = torch.export.export(flat, tuple(tensors), dynamic_shapes=shapes, strict=False)
            return decompose(program, prefix=_PREFIX, dynamic=dims is not None)

    def _traceable(self, tensors: Sequence[torch.Tensor]) -> nn.Module:
        return self.module

    def _failed(self, error: Exception) -> ExportError:
        return ExportError(f"exporting the module raised {describe(error)}")


class ScriptModel(TorchModel):
    """A TorchScript module, converted for every batch size anew (experimental: torch's converter is not complete)."""

    can_be_dynamic = False

    def _traceable(self, tensors: Sequence[torch.Tensor]) -> nn.Module:
        from torch._export.converter import TS2EPConverter

        args, kwargs = self.call.rebuild(tensors)
        script: Any = self.module
        return TS2EPConverter(script, args, kwargs or None).convert().module()

    def _failed(self, error: Exception) -> ExportError:
        return ExportError(
            f"the module cannot be converted from TorchScript: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}",
            hint="TorchScript input is experimental; export the nn.Module that it was made from",
        )


class ExportedModel(TorchModel):
    """A program that torch.export made before: it takes the shapes that it was exported for, and no others."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: nn.Module,
        call: Call,
        output_names: Sequence[str] | None,
    ) -> None:
        super().__init__(module, call, output_names, facts={"source_subframework": "torch.export"})
        shapes = {
            node.name: [size if isinstance(size, int) else None for size in node.meta["val"].shape]
            for node in program.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        self._shapes = [(name, shapes.get(name)) for name in call.names]

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        self._require_shapes(tensors)
        return super().run(tensors)

    def export(self, tensors: Sequence[torch.Tensor]) -> Graph:
        self._require_shapes(tensors)
        return super().export(tensors)

    def _require_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        for (name, wanted), tensor in zip(self._shapes, tensors, strict=True):
            if wanted is None or len(wanted) != tensor.ndim:
                continue
            if any(size is not None and size != found for size, found in zip(wanted, tensor.shape, strict=True)):
                shown = ["any" if size is None else size for size in wanted]
                raise ExportError(
                    f"the program was exported for {name}{shown}, and is to take {list(tensor.shape)}",
                    hint='export it again with dynamic_shapes={"'
                    + name
                    + '": {0: torch.export.Dim("batch")}}, or use --no-batch for its own shapes',
                )


def fitted(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`tensor` in another shape of the same rank: its own values, repeated or cut off along each axis."""
    for axis, size in enumerate(shape):
        extent = tensor.shape[axis]
        if extent != size:
            if not extent:
                raise ExportError(f"an example of shape {list(tensor.shape)} has no values")
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % extent)
    return tensor


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode; afterwards every part of it is in the mode that it was in."""
    training = [child for child in module.modules() if child.training]
    with suppress(NotImplementedError):  # the module of an exported program is in the mode that it was exported in
        module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


@contextmanager
def preserving(module: nn.Module) -> Iterator[None]:
    """Whatever forward does to the buffers of `module` is undone."""
    owners = [
        (child, name, buffer) for child in module.modules() for name, buffer in child.named_buffers(recurse=False)
    ]
    values = [buffer.detach().clone() for _, _, buffer in owners]
    try:
        yield
    finally:
        with torch.no_grad():
            for (child, name, buffer), value in zip(owners, values, strict=True):
                buffer.copy_(value)
                if getattr(child, name) is not buffer and not isinstance(child, torch.jit.ScriptModule):
                    setattr(child, name, buffer)


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
