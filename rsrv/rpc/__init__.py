"""The faces of a server: calls and the engines that carry them, health, reflection, and the HTTP listener."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Call": ".call",
        "Engine": ".engine",
        "GrpcioEngine": ".grpcio_engine",
        "HealthService": ".health",
        "HttpAnswer": ".http",
        "HttpListener": ".http",
        "Route": ".routes",
        "Routes": ".routes",
        "error_trailers": ".status",
        "reflection_routes": ".reflection",
        "reply": ".call",
        "status_of": ".status",
    },
)
