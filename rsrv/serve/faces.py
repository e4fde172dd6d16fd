"""The faces of a worker: which gRPC methods and HTTP paths it answers, and what answers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rsrv.rpc import health
from rsrv.rpc.access import read_token
from rsrv.rpc.health import HealthService
from rsrv.rpc.listen import is_loopback
from rsrv.rpc.reflection import reflection_routes
from rsrv.rpc.routes import Route
from rsrv.serve import control
from rsrv.serve.admin import service as admin
from rsrv.serve.admin.http import admin_http_routes
from rsrv.serve.admin.operations import Administration
from rsrv.serve.admin.repository import RepositoryService
from rsrv.serve.admin.service import AdminService
from rsrv.serve.control import ControlService
from rsrv.serve.http import http_routes
from rsrv.serve.metrics import WorkerMetrics, gpu_label
from rsrv.serve.residency.view import residency_mode
from rsrv.serve.services import SERVICE, Services
from rsrv.serve.status import StatusReport

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.rpc.http import HttpRoutes
    from rsrv.rpc.routes import Routes
    from rsrv.serve.inference import Inference
    from rsrv.serve.live import Live
    from rsrv.serve.numerics import ServerNumerics
    from rsrv.serve.sources import Sources


@dataclass(slots=True)
class Faces:
    """What a worker answers.

    Attributes:
        health: to be told when an answer of it may have changed.
        administration: the operations, for embedders and for the signals of the process.
    """

    grpc: Routes
    http: HttpRoutes
    health: HealthService
    administration: Administration
    _closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Answer what waits with ServerStopping, once what it waits for has ended."""
        for close in self._closers:
            close()


def is_administered(config: ServerConfig) -> bool:
    """Whether calls that change a running server are answered: ``endpoints.admin``; by default, on loopback alone."""
    endpoints = config.endpoints
    return is_loopback(endpoints.host) if endpoints.admin is None else endpoints.admin


def make_faces(
    sources: Sources,
    live: Live,
    inference: Inference,
    config: ServerConfig,
    *,
    worker: str | None,
    numerics: ServerNumerics,
    on_moved: Callable[[], None],
) -> Faces:
    """Raises ConfigError when ``endpoints.admin_token_file`` holds no token."""
    administered, token = is_administered(config), read_token(config.endpoints.admin_token_file)
    services = Services(
        registry=sources.registry,
        lifecycle=sources.lifecycle,
        scheduler=sources.scheduler,
        counters=sources.counters,
        regions=sources.regions,
        residency=sources.residency,
        administered=administered,
    )
    status = StatusReport(sources, config, worker=worker, numerics=numerics)
    controls = ControlService(
        registry=sources.registry,
        lifecycle=sources.lifecycle,
        scheduler=sources.scheduler,
        residency=sources.residency,
        on_moved=on_moved,
    )
    assert sources.residency is not None, "a worker has its residency"
    administration = Administration(
        config,
        registry=sources.registry,
        registrations=live.registrations,
        scheduler=sources.scheduler,
        lifecycle=sources.lifecycle,
        admission=sources.admission,
        residency=sources.residency,
        parameters=live.parameters,
        programs=live.programs,
        reclaimer=live.reclaimer,
        status=status,
        watcher=live.watcher,
        on_moved=on_moved,
    )
    healthy = HealthService(services.is_serving)
    grpc = {
        **services.routes(),
        f"/{SERVICE}/ModelInfer": Route(inference.handle, "unary"),
        **healthy.routes(),
        **controls.routes(),
    }
    names = [SERVICE, health.SERVICE, control.SERVICE]
    http = http_routes(sources.lifecycle, _metrics(sources, config, worker), status, host=config.endpoints.host)
    faces = Faces(grpc, http, healthy, administration, [controls.close])
    if administered:
        by_grpc = AdminService(
            administration, live.events, held=config.held_requests, place=sources.admission.place, token=token
        )
        repository = RepositoryService(
            administration,
            live.registrations,
            sources.registry,
            model_dirs=config.model_dirs,
            static=config.model_control_mode == "static",
            token=token,
        )
        grpc |= by_grpc.routes()
        grpc |= repository.routes()
        names.append(admin.SERVICE)
        faces.http = {**http, **admin_http_routes(administration, live.events, config, token=token)}
        faces._closers += [by_grpc.close, repository.close]
    faces.grpc = grpc | reflection_routes(names)
    return faces


def _metrics(sources: Sources, config: ServerConfig, worker: str | None) -> WorkerMetrics:
    ordinal, platform = config.runtime.device_ordinal, sources.device.platform
    return WorkerMetrics(
        sources,
        info={
            "device_ordinal": str(ordinal),
            "platform": platform,
            "control_mode": config.model_control_mode,
            "discipline": config.scheduler.discipline,
            "residency_mode": residency_mode(sources.residency),
        },
        constant_labels={"worker": worker or "", "gpu": gpu_label(platform, ordinal)},
        triton_compat=config.metrics.triton_compat,
    )
