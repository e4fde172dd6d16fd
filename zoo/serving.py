"""A bundle behind a real ``rsrv serve``: one request per compiled batch size, compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers import rsrv_server
from rsrv.audit.parity import ParityReport, Tolerances, compare
from rsrv.client import KServeModel
from rsrv.export.torch.dtypes import to_numpy
from rsrv.export.torch.model import TorchModel, fitted

REQUEST_SECONDS = 120.0

_ON_CPU = {"JAX_PLATFORMS": "cpu", "RSRV_WORKER_RUNTIME_BACKEND": "cpu"}


def serve_and_compare(
    bundle: Path, model: TorchModel, batch_sizes: Sequence[int], tolerances: Tolerances = None
) -> list[ParityReport]:
    """The comparison for each batch size; a request is the first rows of the model's own examples, repeated if need be.

    Args:
        bundle: the only one in its directory.

    Raises RuntimeError when the server does not become ready, RsrvError when it does not answer.
    """
    reports = []
    with rsrv_server(bundle.parent, environ=_ON_CPU, core=None) as server:
        for size in batch_sizes:
            tensors = [fitted(tensor, (size, *tensor.shape[1:])) for tensor in model.call.tensors]
            reference = {name: to_numpy(tensor) for name, tensor in model.run(tensors).items()}
            inputs = {name: to_numpy(tensor) for name, tensor in zip(model.call.names, tensors, strict=True)}
            with KServeModel(server.target, bundle.name, deadline=REQUEST_SECONDS) as served:
                reports.append(compare(reference, served.infer(inputs), tolerances))
    return reports
