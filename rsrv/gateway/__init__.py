"""The gateway: one address for many workers. It routes, places, watches and merges; it never sees a tensor."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "RunningGateway": ".gateway",
        "serve_gateway": ".app",
    },
)
