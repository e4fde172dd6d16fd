"""The worker: bring-up, registry, hooks, scheduler, the gRPC and HTTP faces, and stop."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "RunningServer": ".worker",
        "plan_memory": ".memory_plan",
        "register_heartbeat": ".observe",
        "register_meta_model": "rsrv.runtime.hooks",
        "register_model": "rsrv.runtime.hooks",
        "register_serve_guard": ".observe",
        "serve": ".app",
        "serve_worker": ".app",
        "unregister_heartbeat": ".observe",
        "unregister_serve_guard": ".observe",
    },
)
