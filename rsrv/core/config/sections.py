"""Every key of a worker's configuration: its type, default, range and meaning. No files or variables are read here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_BATCH_SIZES = 256
"""Programs that one model may be specialised to."""

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
BatchSize = Annotated[int, Field(ge=1, le=2**31 - 1)]
MessageBytes = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""gRPC takes no larger limit, and protobuf knows no larger message."""
NotNegative = Annotated[int, Field(ge=0)]
# What is longer than that (31 years) no clock, lock or poll of the system takes.
Milliseconds = Annotated[float, Field(ge=0, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]
Name = Annotated[str, Field(min_length=1)]
OctalMode = Annotated[str, Field(pattern=r"^[0-7]{3}$")]


@dataclass(frozen=True, slots=True)
class Wanted:
    """In an annotated type: the words for it, where its Python type and its range do not say it."""

    text: str


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
    timeout_seconds: PositiveSeconds | None = 60.0
    """Longest time for one hook call. Null: no limit, and a hook that never returns keeps its thread or process."""
    import_timeout_seconds: PositiveSeconds = 120.0
    """Longest time for the import of one `model.py`."""
    max_lost: NotNegative = 4
    """Hook threads that may be written off as hung, or hook processes that may end, before their model is failed."""


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
    deny_keys: list[Name] = ["rsw-*", "rsrvw-*"]
    """Shell patterns of keys that may never be registered. By default those of weights that workers share."""
    require_same_uid: bool = False
    """Register only objects that belong to the server's own user."""


class FakeDeviceConfig(Section):
    seconds_per_row: Seconds = 0.0
    """How long the fake device takes for one row."""
    memory_bytes: Positive | None = None
    """Memory of the fake device, which is a card then. Unset: it has the host's memory."""


def _cuda_alias(value: Any) -> Any:
    return "cuda" if value == "gpu" else value


class RuntimeConfig(Section):
    backend: Annotated[Literal["auto", "cpu", "cuda", "fake"], BeforeValidator(_cuda_alias)] = "auto"
    """Device to run on; `auto` is CUDA when usable, else the CPU. `fake` is for tests and needs `RSRV_ALLOW_FAKE=1`."""
    fake: FakeDeviceConfig = FakeDeviceConfig()
    device_memory_bytes: Positive | None = None
    """The arena: bytes of device memory for weights and the scratch of one execution. Unset: what the card's allocator
    has; on a CPU no budget, and all weights are resident."""
    weight_cache_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the arena that weights may take, at most. 0: every model is resident for good."""
    weight_cache_wiggle_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of a card's arena that is left free for fragmentation. A CPU needs none."""
    eviction: Literal["lru", "cost"] = "lru"
    """Whose weights go first: those unused for the longest time, or those that cost least to have again: reload time ×
    request rate ÷ bytes."""
    scratch_source: Literal["probe", "compiled", "max"] = "max"
    """Where the size of the scratch comes from: measured at startup on a card, the compiler's numbers, or both."""
    shared_host_weights: bool = False
    """Keep host copies of weights in shared memory, once for all workers of the node."""
    shared_host_weights_mode: OctalMode = "660"
    """Permissions of those shared-memory regions, in octal digits."""
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
    xla_options: dict[Name, bool | int | float | str] = {}
    """Options of XLA for every compilation: flags without dashes and their values. An unknown one is refused."""
    numerics: Literal["auto", "f32", "tf32"] = "auto"
    """Products in float32: `auto`, as the hardware does them; `f32`, alike everywhere; `tf32`, where a card has it."""
    autotune: bool = True
    """Let XLA time kernels on the card while it compiles. Off: its default kernels, the same in every run."""
    autotune_cache: bool | None = None
    """Keep what was timed in `runtime.autotune_cache_dir`. Unset: as XLA does it."""
    autotune_cache_dir: str = ""
    """Directory of the timings. Empty it when the driver or jaxlib changes."""

    @model_validator(mode="after")
    def _tf32_needs_a_card(self) -> RuntimeConfig:
        if self.numerics == "tf32" and self.backend == "cpu":
            raise ValueError("numerics is tf32, which no CPU computes in; wanted auto or f32 with backend cpu")
        return self


_RESIDENCY_ALIASES = {"pinned_system": "system", "pinned_device": "device"}


def _residency_alias(value: Any) -> Any:
    return _RESIDENCY_ALIASES.get(value, value) if isinstance(value, str) else value


class ModelSchedulingConfig(Section):
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the device under `fair`, relative to the weights of the other models that have work."""
    max_wait_ms: Milliseconds | None = None
    """How long a request of this model may wait for others to run with. Unset: `batching.max_wait_ms`."""
    max_batch_size: AtLeastOne | None = None
    """Most rows that requests are merged to. Unset: the largest compiled batch size. A larger request stays whole."""
    residency: Annotated[Literal["unpinned", "system", "device"], BeforeValidator(_residency_alias)] | None = None
    """Where this model's weights always are: nowhere, in host memory, or on the device. Unset: `system` on a card,
    `unpinned` where device memory is host memory; there `system` and `device` are the same."""
    batch_sizes: Annotated[list[BatchSize], Field(min_length=1, max_length=MAX_BATCH_SIZES)] | None = None
    """Batch sizes to compile for, when the bundle has `batching.dynamic: true`. Unset: those that it lists."""

    @field_validator("batch_sizes")
    @classmethod
    def _each_once(cls, sizes: list[int] | None) -> list[int] | None:
        for size in sizes or ():
            if sizes is not None and sizes.count(size) > 1:
                raise ValueError(f"the batch size {size} is there twice")
        return sizes


class SchedulerConfig(Section):
    discipline: Literal["fair", "fifo", "edf"] = "fair"
    """Which model runs next: the one that is owed most device time, the oldest request's, the earliest deadline's."""
    fair_population: Literal["active", "prepared"] = "active"
    """Over which models `fair` takes shares: those with work, or all (the rule of an older system)."""
    ema_halflife_seconds: PositiveSeconds = 30.0
    """Under `fair`, seconds after which device time that a model used counts half."""
    recency_penalty_cap: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Under `fair`, the most that a model's share of the device may count as owed or overdrawn."""
    coalescing_discount: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Under `fair`, how much cheaper a batch of at least two requests counts."""
    cost_ema_alpha: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Weight of the newest measurement of how long a program takes."""
    max_queue_depth: Positive = 1024
    """Requests that may wait for one model; one more is refused."""
    dispatch_timeout_seconds: PositiveSeconds = 30.0
    """An execution that takes longer is reported as stuck, and the server is not ready until it returns."""
    implicit_deadline: bool = False
    """Give requests without a deadline one: `dispatch_timeout_seconds` after their arrival."""
    variant_overtakes: NotNegative = 0
    """How many later requests of another shape may pass a request, so that mixed shapes fill batches; 0 = none."""
    shed_late: bool = True
    """Refuse a request at once when the queue before it takes longer, as measured, than its deadline allows."""
    compaction_interval: NotNegative = 0
    """After so many loads for requests, free all weights that may be freed, so that the allocator's holes merge; 0 =
    never."""
    models: dict[Name, ModelSchedulingConfig] = {}
    """Settings of single models, by name."""


class BatchingConfig(Section):
    max_wait_ms: Milliseconds = 0.0
    """Milliseconds that a request may wait for others to run with, while the device is free; 0 = not at all."""
    split_oversize: bool = False
    """Run a request with more rows than any program takes in pieces; otherwise it is refused."""


class ReloadConfig(Section):
    policy: Literal["drain", "reject", "evict_first"] = "drain"
    """Requests that a reload finds queued: `drain` answers them by the version that they came for; `reject` refuses
    them; `evict_first` refuses them, too, and frees the old version before the new one is compiled for the device."""


class AdmissionConfig(Section):
    hold: Literal["auto", "always"] = "auto"
    """Which new requests wait instead of being refused: `auto`, those at a closed gate, unless a gateway has another
    worker for them; `always`, those for a model that is being prepared, too. The request parameter `rsrv_hold` goes
    first."""
    held_requests: NotNegative | None = None
    """Requests that may wait so. Unset: half of `endpoints.max_concurrent_requests`; 0: none."""


class AdminConfig(Section):
    model_capacity: Positive = 1024
    """Models that may be registered, failed ones and those that are being removed included."""
    program_capacity: AtLeastOne = 4
    """Program sets that a model may have: the original, pending and failed ones included."""
    allow_external_dirs: bool = False
    """Register bundles from outside of `model_dirs`, too."""


class ReclaimConfig(Section):
    parameter_idle_ms: Milliseconds = 0.0
    """Free the device copy of weights that nobody has used for so long; 0 = never."""
    workspace_idle_ms: Milliseconds = 0.0
    """Give back staging buffers that nobody has used for so long; 0 = never."""
    host_idle_ms: Milliseconds = 0.0
    """Drop the host copy of weights, too, that have been off the device for so long; 0 = never."""


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
    admin: bool | None = None
    """Answer calls that administrate over HTTP and gRPC. Unset: when `host` is a loopback address."""
    admin_token_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the bearer token that such calls must have. Unset: none."""

    @model_validator(mode="after")
    def _ports_differ(self) -> EndpointsConfig:
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError(f"grpc_port and http_port are both {self.grpc_port}; wanted two ports that differ")
        return self


class MetricsConfig(Section):
    triton_compat: bool = False
    """Export requests under the names of Triton Inference Server, too (`nv_inference_*`)."""


class GrpcConfig(Section):
    max_recv_msg_bytes: MessageBytes = 512 << 20
    """Largest message that is received."""
    max_send_msg_bytes: MessageBytes = 512 << 20
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
    model_control_mode: Literal["static", "dynamic", "explicit"] = "dynamic"
    """Who changes what while the server runs. `static`: nobody, and weights move as requests need them; `dynamic`: the
    models follow their directories; `explicit`: an operator or gateway registers models and moves their weights, and a
    model whose weights are elsewhere is refused."""
    model_poll_seconds: PositiveSeconds = 15.0
    """Under `dynamic`, how often the directories are looked through, whether the system reported a change or not."""
    model_settle_seconds: PositiveSeconds = 1.0
    """Under `dynamic`, how long a changed bundle must have stayed the same before it is used."""
    cache_dir: str = ""
    """Directory for what restarts can use again: compiled programs. Empty: nothing is kept."""
    cache_max_bytes: Positive | None = 8 << 30
    """How many bytes the compiled programs in `cache_dir` may take; those unused for the longest time go first."""
    startup: StartupConfig = StartupConfig()
    bundles: BundlesConfig = BundlesConfig()
    hooks: HooksConfig = HooksConfig()
    shm: ShmConfig = ShmConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    batching: BatchingConfig = BatchingConfig()
    endpoints: EndpointsConfig = EndpointsConfig()
    metrics: MetricsConfig = MetricsConfig()
    grpc: GrpcConfig = GrpcConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    reload: ReloadConfig = ReloadConfig()
    admission: AdmissionConfig = AdmissionConfig()
    admin: AdminConfig = AdminConfig()
    reclaim: ReclaimConfig = ReclaimConfig()

    @property
    def held_requests(self) -> int:
        """Requests that may wait outside a closed gate."""
        held = self.admission.held_requests
        return self.endpoints.max_concurrent_requests // 2 if held is None else held

    @model_validator(mode="after")
    def _held_leave_room(self) -> ServerConfig:
        held, limit = self.admission.held_requests, self.endpoints.max_concurrent_requests
        if held is not None and held >= limit:
            raise ValueError(
                f"admission.held_requests is {held}; wanted less than endpoints.max_concurrent_requests, "
                f"which is {limit}"
            )
        return self
