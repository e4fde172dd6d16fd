"""A TorchScript module as a model to be exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rsrv.core.errors import ExportError
from rsrv.export.torch.arguments import bind
from rsrv.export.torch.model import TorchModel
from rsrv.export.torch.torchscript import Wrap, explain_script, script_program, wrapped


class ScriptModel(TorchModel):
    """A script module, what a caller's `wrap` made of it, or a module that has script modules in it."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        inputs: Any,
        kwargs: Any,
        output_names: Sequence[str] | None,
        wrap: Wrap | None,
    ) -> ScriptModel:
        """Raises ExportError when `wrap` returns no module, or the examples do not fit its forward."""
        made = wrapped(module, wrap)
        facts = {"source_subframework": "torchscript"} if isinstance(module, torch.jit.ScriptModule) else {}
        if wrap is not None:
            facts["torchscript_wrap"] = getattr(wrap, "__qualname__", type(wrap).__qualname__)
        return cls(made, bind(made.forward, inputs, kwargs), output_names, facts=facts)

    def _program(
        self, tensors: Sequence[torch.Tensor], dims: list[dict[int, Any]] | None
    ) -> torch.export.ExportedProgram:
        return script_program(self._flattened(), tensors, dims)

    def _explain(self, error: Exception) -> ExportError:
        return explain_script(error, self.module) or super()._explain(error)
