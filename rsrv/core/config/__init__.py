"""Configuration of a worker and of a node: the keys, where their values come from, and how a node file is read."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BundlesConfig": ".sections",
        "EndpointsConfig": ".sections",
        "FakeDeviceConfig": ".sections",
        "GrpcConfig": ".sections",
        "HooksConfig": ".sections",
        "KeyRow": ".keys",
        "MetricsConfig": ".sections",
        "ModelSchedulingConfig": ".sections",
        "NodeConfig": ".node",
        "ResolvedConfig": ".resolution",
        "RuntimeConfig": ".sections",
        "SchedulerConfig": ".sections",
        "ServerConfig": ".sections",
        "ShmConfig": ".sections",
        "ShutdownConfig": ".sections",
        "StartupConfig": ".sections",
        "WorkerBlock": ".node",
        "WorkerEntry": ".node",
        "hook_pool_size": ".environment",
        "json_schema": ".schema",
        "key_table": ".keys",
        "load_node": ".node",
        "node_key_table": ".node",
        "process_variables": ".environment",
        "resolve": ".resolution",
        "worker_name": ".environment",
    },
)
