"""A PyTorch model as a function of named tensors, to be run eagerly and to be exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rsrv.core.errors import ExportError, RsrvError
from rsrv.export.torch.arguments import Call
from rsrv.export.torch.graph import Graph, decompose
from rsrv.export.torch.refusals import explain
from rsrv.export.torch.tracing import PREFIX as PREFIX
from rsrv.export.torch.tracing import FlatModule, evaluating, traced, tracing
from rsrv.export.usercode import describe, user_code
from rsrv.stablehlo.mlir import summary


class TorchModel:
    """A module with its example call.

    Args:
        module: any nn.Module; it is run and exported in evaluation mode and left as it was.
        facts: further provenance.
    """

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
            return self._flattened().named([tensor.clone() for tensor in tensors])

    def export(self, tensors: Sequence[torch.Tensor]) -> Graph:
        """The graph for exactly these shapes. Raises ExportError."""
        try:
            return self._export(tensors, None)
        except RsrvError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    def export_dynamic(self, tensors: Sequence[torch.Tensor], axes: Sequence[int], largest: int) -> Graph:
        """One graph for every batch size from 1 to `largest`. Raises ExportError when torch.export fixes the size.

        `tensors` have a batch of 2 rows or more along their `axes`.
        """
        batch = torch.export.Dim("batch", min=1, max=max(2, largest))
        try:
            return self._export(tensors, [{axis: batch} for axis in axes])
        except RsrvError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise explain(error) or ExportError(f"torch.export fixes the batch size: {summary(said)}") from error

    def _export(self, tensors: Sequence[torch.Tensor], dims: list[dict[int, Any]] | None) -> Graph:
        with tracing(self.module):
            return decompose(self._program(tensors, dims), prefix=PREFIX, dynamic=dims is not None)

    def _program(
        self, tensors: Sequence[torch.Tensor], dims: list[dict[int, Any]] | None
    ) -> torch.export.ExportedProgram:
        return traced(self._flattened(), tensors, dims)

    def _flattened(self) -> FlatModule:
        """A new one for each use: torch.export leaves marks on a module that it could not take."""
        return FlatModule(self.module, self.call, self._output_names)

    def _explain(self, error: Exception) -> ExportError:
        return explain(error) or self._failed(error)

    def _failed(self, error: Exception) -> ExportError:
        return ExportError(f"exporting the module raised {describe(error)}")


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
                dims = ", ".join(f'"{one}": {{0: batch}}' for one, _ in self._shapes)
                raise ExportError(
                    f"the program was exported for {name}{shown}, and is to take {list(tensor.shape)}",
                    hint='to serve any batch size, save it again with batch = torch.export.Dim("batch", min=1, max=64) '
                    f"and torch.export.export(module, args, dynamic_shapes={{{dims}}}), args having two rows or more; "
                    "--no-batch (batch_sizes=None) exports it for its own shapes",
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
