"""How a single ATen operator is computed in JAX: our own lowerings first, then those of torchax.

torchax is used for this table and for its decompositions, never for its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

Lowering = Callable[..., Any]


@dataclass(frozen=True)
class Registry:
    """`decompositions`: operator → function that expresses it in simpler ones."""

    decompositions: Mapping[Any, Callable[..., Any]]
    _own: Mapping[Any, Lowering]
    _torchax: Mapping[Any, Any]

    def find(self, target: Any) -> Lowering | None:
        """The lowering of an operator overload (``aten.add.Tensor``), or None."""
        if (own := self._own.get(target)) is not None:
            return own
        entry = self._torchax.get(target) or self._torchax.get(target.overloadpacket)
        # The others work on torchax's tensors, or draw from its random state.
        return entry.func if entry is not None and entry.is_jax_function and not entry.needs_env else None


@cache
def registry() -> Registry:
    """Import torchax (0.2 s, beside torch and jax) without its effects on this process.

    Its import renames the device ``privateuseone`` to ``jax``, after which torch.export refuses models with
    `torch.cond` or `while_loop`, and turns off the fast path of attention. The table needs neither.
    """
    from rsrv.export.torch.lowerings import OWN

    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with (
            _replaced(torch.utils, "rename_privateuse1_backend"),
            _replaced(torch, "_register_device_module"),
        ):
            import_module("torchax.ops.jaten")
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    decompositions = import_module("torchax.decompositions").DECOMPOSITIONS
    return Registry(decompositions, OWN, import_module("torchax.ops.ops_registry").all_aten_ops)


@contextmanager
def _replaced(owner: Any, name: str) -> Iterator[None]:
    """A function that does nothing in the place of ``owner.name``."""
    before = getattr(owner, name)
    setattr(owner, name, lambda *args: None)
    try:
        yield
    finally:
        setattr(owner, name, before)
