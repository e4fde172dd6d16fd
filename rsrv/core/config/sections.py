"""Every key of a worker's configuration: its type, default, range and meaning. No files or variables are read here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]


def refuse(values: tuple[str, ...], text: str) -> BeforeValidator:
    """Refuse values that have a meaning, but not in this version, with a text that says so."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in values:
            raise ValueError(text.format(value=value))
        return value

    return BeforeValidator(check)


class Section(BaseModel):
    """A frozen group of keys. Strict: no text for a number, no number for a boolean; ints pass as floats."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class StartupConfig(Section):
    ready_when: Literal["all", "any"] | Annotated[list[Name], Field(min_length=1)] = "all"
    """Which models must be prepared before the server says that it is ready."""


class BundlesConfig(Section):
    digests: Literal["strict", "programs", "off"] = "programs"
    """Which entries of a manifest's `files:` must match before use: all, the programs, or none."""


class HooksConfig(Section):
    allow: bool = True
    """Run the bundles' `model.py`. When false a bundle with hooks is refused."""
    timeout_seconds: PositiveSeconds | None = None
    """Longest time for one hook call. Unset: only the request's deadline bounds it."""
    max_lost: NotNegative = 4
    """Hook threads that may be written off as hung before their model is failed."""


class ShmConfig(Section):
    enabled: bool = True
    """Accept shared-memory regions of clients."""
    reap_seconds: PositiveSeconds = 60.0
    """Idle time after which the region of a dead client, or one that was unlinked, is dropped."""
    max_regions: Positive = 1024
    """How many regions may be registered at a time."""
    max_total_bytes: Positive | None = None
    """How many bytes the registered regions may have together. Unset: no limit."""
    allow_keys: list[Name] = []
    """Shell patterns of the keys that may be registered. Empty: all that `deny_keys` leaves."""
    deny_keys: list[Name] = ["rsw-*"]
    """Shell patterns of keys that may never be registered."""
    require_same_uid: bool = False
    """Register only objects that belong to the server's own user."""


class FakeDeviceConfig(Section):
    seconds_per_row: Seconds = 0.0
    """How long the fake device takes for one row."""


def _cuda_alias(value: Any) -> Any:
    return "cuda" if value == "gpu" else value


class RuntimeConfig(Section):
    backend: Annotated[Literal["auto", "cpu", "cuda", "fake"], BeforeValidator(_cuda_alias)] = "auto"
    """Device to run on; `auto` is CUDA when usable, else the CPU. `fake` is for tests and needs `RSRV_ALLOW_FAKE=1`."""
    fake: FakeDeviceConfig = FakeDeviceConfig()
    map_weights: bool = False
    """Map the weights file instead of reading it. A rewrite in place then changes answers or kills the process."""
    cpu_threads: AtLeastOne | None = None
    """Threads of the CPU device. Unset: one per core."""
    device_ordinal: NotNegative = 0
    """Which of the visible devices to use."""
    mem_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the card's memory that the allocator may take."""
    preallocate: bool = True
    """Claim that share when the device is opened."""
    allow_cpu_fallback: bool = True
    """Use the CPU when the CUDA device cannot be opened."""
    compile_workers: AtLeastOne = 1
    """Processes that parse and compile programs."""
    compile_timeout_seconds: PositiveSeconds = 600.0
    """Longest time for one program to compile."""
    compile_memory_bytes: Positive | None = None
    """Memory that a compile process may use. Unset: no limit."""


class ModelSchedulingConfig(Section):
    max_batch_size: AtLeastOne | None = None
    """Most rows that requests are merged to. Unset: the largest compiled batch size. A larger request stays whole."""


class SchedulerConfig(Section):
    max_queue_depth: Positive = 1024
    """Requests that may wait for one model; one more is refused."""
    models: dict[Name, ModelSchedulingConfig] = {}
    """Settings of single models, by name."""


class EndpointsConfig(Section):
    host: Name = "127.0.0.1"
    """Address to listen on."""
    grpc_port: Port = 8001
    """Port of gRPC; 0 = the system chooses one, which is printed."""
    http_port: Port | None = 8002
    """Port of health and metrics over HTTP; 0 = the system chooses one, null = off."""
    max_concurrent_requests: Annotated[
        int,
        Field(ge=1),
    ] = 64
    """ModelInfer calls in progress; one more is refused at once."""
    engine: Annotated[
        Literal["grpcio"], refuse(("native",), "the engine {value!r} is not built yet; wanted 'grpcio'")
    ] = "grpcio"
    """Implementation of the gRPC server."""

    @model_validator(mode="after")
    def _ports_differ(self) -> EndpointsConfig:
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError(f"grpc_port and http_port are both {self.grpc_port}; wanted two ports that differ")
        return self


class GrpcConfig(Section):
    max_recv_msg_bytes: Positive = 512 << 20
    """Largest message that is received."""
    max_send_msg_bytes: Positive = 512 << 20
    """Largest message that is sent."""


class ShutdownConfig(Section):
    pause_seconds: Seconds = 0.0
    """How long requests are still accepted after the server has stopped saying that it is ready."""
    grace_seconds: Seconds = 30.0
    """How long accepted requests may take to finish."""


class ServerConfig(Section):
    """The configuration of one worker, as it stays for the life of the process."""

    model_dirs: Annotated[list[Name], Field(min_length=1)]
    """Directories that hold bundles."""
    models_include: list[Name] = []
    """Names of the bundles to serve. Empty: all."""
    allow_unhooked: list[Name] = []
    """Bundles of format 2.0 to serve without their hooks, which cannot run here: clients see the program's tensors."""
    model_control_mode: Annotated[
        Literal["static"],
        refuse(("dynamic", "explicit"), "the control mode {value!r} is not supported yet; wanted 'static'"),
    ] = "static"
    """How the set of models may change while the server runs; `static`: not at all."""
    startup: StartupConfig = StartupConfig()
    bundles: BundlesConfig = BundlesConfig()
    hooks: HooksConfig = HooksConfig()
    shm: ShmConfig = ShmConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    endpoints: EndpointsConfig = EndpointsConfig()
    grpc: GrpcConfig = GrpcConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
