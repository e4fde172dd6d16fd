"""A bundle behind a real server of its own, for ``rsrv bundle verify --served`` (X-54)."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.cli.local_server import LocalServer
from rsrv.core.errors import BundleError, RsrvError, ServerUnreachable, UsageError

if TYPE_CHECKING:
    import numpy as np

    from rsrv.audit.verify import Ask


@contextlib.contextmanager
def served(bundle: Path, *, backend: str, timeout: float) -> Iterator[Ask]:
    """Serve the bundle alone, on a free loopback port, for the time of the block; `timeout` in seconds, for the start
    and for each request.

    Raises BundleError when it cannot be served; so does what it yields when the server is gone.
    """
    from rsrv.client.model import KServeModel

    bundle = bundle.absolute()
    if ":" in bundle.name:
        raise UsageError(f"{bundle}: --served cannot choose a bundle with a colon in its name", hint="rename it")
    settings = {"RSRV_WORKER_RUNTIME_BACKEND": backend, "RSRV_WORKER_MODELS_INCLUDE": bundle.name}
    with (
        tempfile.TemporaryDirectory(prefix="rsrv-verify-") as scratch,
        LocalServer(bundle.parent, Path(scratch, "server.log"), settings) as server,
    ):
        end = time.monotonic() + timeout
        try:
            server.wait_listening(end)
            with KServeModel(server.url, bundle.name, deadline=min(timeout, 10.0), shared_memory="off") as probe:
                server.wait_model(probe, end)
        except RsrvError as error:
            raise BundleError(f"bundle {bundle.name!r} is not served: {error.message}", rule="X-54") from error

        def ask(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            try:
                return model.infer(inputs)
            except ServerUnreachable:
                try:
                    server.require_running()
                except RsrvError as gone:
                    raise BundleError(f"bundle {bundle.name!r}: {gone.message}", rule="X-54") from gone
                raise

        with KServeModel(server.url, bundle.name, deadline=timeout, shared_memory="off") as model:
            yield ask
