"""The numerics mode of a server (worker §9): prepared before a client exists, held against the device, and probed."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import ConfigError, DeviceError, RsrvError
from rsrv.runtime.device import execute
from rsrv.serve.loading.programs import ProgramJob
from rsrv.stablehlo.policy import Numerics, Policy, tf32_capable

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.loading.programs import ProgramSource

log = logging.getLogger(__name__)

OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""Read by NVIDIA's libraries when they are loaded; 0 takes TF32 out of everything that they compute."""

SIZE = 512
_PROBE = f"""module @numerics_probe {{
  func.func public @main(%a: tensor<{SIZE}x{SIZE}xf32>, %b: tensor<{SIZE}x{SIZE}xf32>) -> tensor<{SIZE}x{SIZE}xf32> {{
    %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<{SIZE}x{SIZE}xf32>, tensor<{SIZE}x{SIZE}xf32>) -> tensor<{SIZE}x{SIZE}xf32>
    return %c : tensor<{SIZE}x{SIZE}xf32>
  }}
}}""".encode()


@dataclass(frozen=True, slots=True)
class ServerNumerics:
    """What a server knows about its arithmetic.

    Attributes:
        policy: what is done to every program, before its batch size.
        tf32_active: whether products at default precision are computed in TF32; None = not probed, or unclear.
        pinned_exact: whether products that were pinned to float32 came out exact; None = not probed.
    """

    policy: Policy = field(default_factory=Policy)
    tf32_active: bool | None = None
    pinned_exact: bool | None = None

    @property
    def mode(self) -> Numerics:
        return self.policy.numerics


def prepare_environment(mode: Numerics, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what has to be in the environment before any device client exists, in this process or a child of it."""
    if mode != "f32":
        return
    if environ.get(OVERRIDE, "0") != "0":
        log.warning(
            "environment variable replaced name=%s was=%r why=runtime.numerics is f32", OVERRIDE, environ[OVERRIDE]
        )
    environ[OVERRIDE] = "0"


def numerics_for(mode: Numerics, device: Device) -> ServerNumerics:
    """The policy of `mode` on `device`. Raises ConfigError for tf32 on a device that has no TF32."""
    capability = device.facts.get("compute capability")
    capable = tf32_capable(device.platform, capability)
    if mode == "tf32" and not capable:
        found = device.platform if capability is None else f"{device.platform} (compute capability {capability})"
        raise ConfigError(
            f"runtime.numerics is tf32, but {device.kind} on {found} has no TF32",
            hint="use a CUDA device of compute capability 8.0 or later, or runtime.numerics: auto",
        )
    return ServerNumerics(Policy(mode, capable))


def probe(numerics: ServerNumerics, device: Device, source: ProgramSource) -> ServerNumerics:
    """Multiply a matrix by the identity the way models are compiled and run, and see what became of its last bits.

    Raises DeviceError when the mode is f32 and a product that was pinned to float32 is not exact; that the first
    product cannot be computed, at default precision, is only a warning.
    """
    active: bool | None = None
    try:
        active = _tf32_was_used(_product(device, source, replace(numerics.policy, numerics="auto")))
        if active is None:
            log.warning("numerics probe unclear why=the product is neither exact nor rounded to TF32")
    except RsrvError as error:
        log.warning("numerics probe failed why=%s", error.message)
    exact: bool | None = None
    if numerics.mode == "f32":
        exact = np.array_equal(_product(device, source, numerics.policy), _matrix())
        if not exact:
            raise DeviceError(
                f"runtime.numerics is f32, but {device.kind} does not compute a product pinned to float32 exactly",
                hint="runtime.numerics: auto serves with the arithmetic of this device",
            )
    log.info("numerics probe mode=%s tf32_active=%s pinned_exact=%s", numerics.mode, active, exact)
    return replace(numerics, tf32_active=active, pinned_exact=exact)


def _tf32_was_used(product: np.ndarray) -> bool | None:
    if np.array_equal(product, _matrix()):
        return False
    return True if bool((product == 1.0).all()) else None


def _product(device: Device, source: ProgramSource, policy: Policy) -> np.ndarray:
    job = ProgramJob.of("numerics probe", (), 0, _PROBE, policy)
    loaded = source.load(job, source.find(job))
    (product,) = execute(device, loaded.executable, [_matrix(), np.eye(SIZE, dtype=np.float32)])
    return product


@cache
def _matrix() -> np.ndarray:
    """Symmetric, so that no layout matters; each value is a float32 less than half a TF32 step above 1."""
    index = np.arange(SIZE)
    return (1.0 + (index[:, None] + index) % SIZE * 2.0**-20).astype(np.float32)
