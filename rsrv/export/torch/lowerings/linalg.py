"""Linear algebra whose results come with an error code, which is always 0 here: a program cannot raise."""

from __future__ import annotations

from typing import Any

import jax.lax.linalg
import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.linalg_inv_ex.default)
def inv_ex(a: Any, *, check_errors: bool = False) -> tuple[Any, Any]:
    """a[…,n,n] → its inverse, codes […]."""
    return jnp.linalg.inv(a), _codes(a)


@lowering(aten.linalg_cholesky_ex.default)
def cholesky_ex(a: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    """a[…,n,n] → its Cholesky factor, codes […]."""
    factor = jnp.linalg.cholesky(a)
    return (jnp.conj(jnp.swapaxes(factor, -1, -2)) if upper else factor), _codes(a)


@lowering(aten._linalg_solve_ex.default)
def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any, Any]:
    """a[…,n,n], b[…,n,k] or b[…,n] → x with a·x = b (x·a = b unless `left`), the factors of a, pivots, codes."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    columns = b[..., None] if vector else b
    x = (
        jnp.linalg.solve(a, columns)
        if left
        else jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(columns, -1, -2)), -1, -2)
    )
    factors, pivots, _ = jax.lax.linalg.lu(a)
    return (x[..., 0] if vector else x), factors, pivots + 1, _codes(a)


@lowering(aten._linalg_det.default)
def det(a: Any) -> tuple[Any, Any, Any]:
    """a[…,n,n] → its determinant […], and the factors with their pivots."""
    factors, pivots, _ = jax.lax.linalg.lu(a)
    return jnp.linalg.det(a), factors, pivots + 1


@lowering(aten._linalg_slogdet.default)
def slogdet(a: Any) -> tuple[Any, Any, Any, Any]:
    """a[…,n,n] → sign and log of its determinant […], and the factors with their pivots."""
    sign, log = jnp.linalg.slogdet(a)
    factors, pivots, _ = jax.lax.linalg.lu(a)
    return sign, log, factors, pivots + 1


def _codes(a: Any) -> Any:
    return jnp.zeros(a.shape[:-2], jnp.int32)
