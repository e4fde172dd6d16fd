"""The status document of a worker: what ``GET /v1/status`` answers, field by field. `docs/status.md` is made from here.

Times are in seconds, sizes in bytes; counts start with the process. Readers ignore fields that they do not know.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="null"
    )


class NumericsStatus(_Part):
    """The arithmetic of a server."""

    mode: str
    """`runtime.numerics`: auto, f32 or tf32."""
    tf32_active: bool | None
    """Whether products at default precision are computed in TF32; null = not probed, or unclear."""
    pinned_exact: bool | None
    """Whether a product that was pinned to float32 came out exact; null = not probed."""


class LoadedPrograms(_Part):
    """How far the loading is."""

    total: int
    """Programs of the bundles that were opened."""
    cache: int
    """Those whose executable came from the cache."""
    compiled: int
    """Those that were compiled."""
    shared: int
    """Those that another model had brought along."""
    compile_seconds: float
    """Seconds that compilations took."""


class ServerLimits(_Part):
    """What is refused beyond these."""

    max_concurrent_requests: int
    """ModelInfer calls at a time."""
    max_queue_depth: int
    """Requests that wait for one model."""
    held_requests: int
    """Requests that wait outside of closed gates, admin calls that wait, and event streams."""
    model_capacity: int
    """Registered models, failed ones and those that are being removed included."""
    program_capacity: int
    """Program sets of one model."""
    variant_overtakes: int
    """How often requests of one shape may pass one of another shape."""


class IdlePolicy(_Part):
    """What is given back after nobody used it for so long, in milliseconds; 0 = never."""

    parameter_ms: float
    """Weights on the device."""
    workspace_ms: float
    """Staging buffers in host memory."""
    host_ms: float
    """Copies of weights in host memory, since they left the device."""
    device_workspace: bool
    """Whether scratch on the device is given back, too; false: it is part of the arena, which the process keeps."""


class ServerStatus(_Part):
    """The worker."""

    name: str
    """Always rsrv."""
    version: str
    """Version of rsrv."""
    worker: str | None
    """Its name in the node file; null when it was started without one."""
    state: str
    """starting, serving, stopping, stopped or failed."""
    ready: bool
    """What `/readyz` says."""
    phase: str
    """What the server is doing."""
    reason: str
    """Why it is not ready; empty when it is."""
    stuck: str
    """Which execution has run for too long; empty when none has."""
    uptime_s: float
    """Since its ports answer."""
    control_mode: str
    """`model_control_mode`."""
    residency_mode: str
    """Who decides which weights are on the device: the server (self_managed) or an operator (externally_managed)."""
    discipline: str
    """`scheduler.discipline`."""
    numerics: NumericsStatus
    programs: LoadedPrograms
    idle: IdlePolicy
    limits: ServerLimits
    inflight: int
    """ModelInfer calls being handled."""
    held_requests: int
    """ModelInfer calls that wait outside of a closed gate, or for a model that is being prepared."""
    shed: int
    """ModelInfer calls refused at the limit."""


class WeightBudget(_Part):
    """What the memory for weights is used for. What several models share counts once."""

    arena_bytes: int
    """All that weights and the scratch of one execution may take."""
    pool_bytes: int
    """What of it is for weights."""
    scratch_bytes: int
    """What is kept free for one execution."""
    pinned_bytes: int
    """Weights of models whose floor keeps them there, or on their way; those that an operator pinned are counted in
    `resident_bytes`, and not in `evictable_bytes`."""
    budget_bytes: int
    """What is left for weights that come and go."""
    resident_bytes: int
    """What those take now: those on their way to the device count, those on their way out do not."""
    pending_bytes: int
    """What of that has not arrived yet."""
    releasing_bytes: int
    """What left by the books, and is freed when the last execution that uses it has ended."""
    evictable_bytes: int
    """What of it could be freed now."""
    eviction: str
    """`runtime.eviction`."""
    uses: int
    """Batches prepared for models whose weights come and go; one prepared again, with more rows, counts again."""
    loads: int
    """Loads of weights, pinned ones as well; of removed models, too."""
    load_seconds: float
    """Seconds that those took."""
    evictions: dict[str, int]
    """Evictions by reason: `room` for others, a smaller `budget`, `oom`, a change of the `floor`, `unload`, `trim`."""
    idle_reclaims: int
    """How often weights were freed because nobody had used them for long; those are no evictions."""
    compactions: int
    """How often all weights that may be evicted were freed to merge holes."""
    lru_age_s: float | None
    """For how long those were not used that nobody used for longest; null when none are there."""
    bytes_for_99_percent_hits: int | None
    """The budget with which 99 % of repeated uses would have found their weights; null when nothing was used twice."""


class DeviceStatus(_Part):
    """The device that programs run on."""

    device: int
    """`runtime.device_ordinal`."""
    platform: str
    """cpu, cuda or fake."""
    kind: str
    """Model of the device."""
    weights_bytes: int
    """Weights in its memory (committed). What several models share counts once. Those on their way out still count, so
    it may be above the budget's `resident_bytes` + `pinned_bytes` for a moment."""
    budget: WeightBudget | None
    """Null where all weights are on the device for good."""
    in_use_bytes: int | None
    """What its allocator has handed out; null where nobody counts (CPU)."""
    peak_bytes: int | None
    """The most that it ever had."""
    limit_bytes: int | None
    """What it may hand out."""
    largest_free_block_bytes: int | None
    """The largest block that is free."""


class ModelError(_Part):
    """Why something that was done with a model failed."""

    phase: str
    """In which step."""
    type: str
    """Name of the error."""
    message: str
    """Its text."""


class AcceptedRequests(_Part):
    """The requests that a model has accepted and not answered yet; a gate is drained when there are none."""

    queued: int
    """Those that wait for the device."""
    executing: int
    """Those in batches that are staged, running or being answered."""
    hooks: int
    """Those in hooks, and those being read or written."""
    earlier: int
    """Those that an earlier version of the model still has."""


class ModelResidency(_Part):
    """Where the weights of a model are."""

    floor: str
    """What they never leave: nothing (unpinned), host memory (system) or the device."""
    state: str
    """On the device: resident, loading or cold."""
    host_copy: bool
    """Whether a copy is kept in host memory."""
    host_shared: bool
    """Whether other workers may use the same copy."""
    pinned: bool
    """Whether they are never evicted from the device, by their floor or by an operator."""
    pinned_by_operator: bool
    """Whether `rsrv ctl pin` says so. Weights that are not on the device remember it."""
    committed_bytes: int
    """Bytes that they take on the device now."""
    releasing_bytes: int
    """What of it is freed when the last execution that uses it has ended."""
    host_bytes: int
    """Bytes of the copy in host memory."""
    operation: str
    """What an operator's call does to them now: idle, waiting (for memory), activating or deactivating."""
    operation_error: ModelError | None
    """Why the last of those calls failed; null when it did not."""
    loads: int
    """How often they were loaded, pinned or not; 0 without a budget."""
    evictions: int
    """How often they were evicted."""
    load_seconds: float | None
    """What a load takes, averaged over the last ones; null before the first."""
    uses_per_second: float
    """Batches prepared for the model, averaged over the last minutes."""
    idle_s: float | None
    """Since their last use or load; null when there was none."""


class ModelPrograms(_Part):
    """What was compiled for a model."""

    batch_sizes: list[int]
    """Compiled batch sizes; 0 = one program without one."""
    shape_variants: list[list[int]]
    """Compiled sizes of the variable axes; one empty list when there are none."""
    max_batch_size: int
    """Most rows that requests are merged to; 0 = never merged."""
    numerics: str
    """What was done about the arithmetic of the programs."""
    selected: int
    """The program set that answers requests; 1 is the one that came with the bundle."""
    retained: int
    """Program sets that exist, pending and failed ones included."""
    capacity: int
    """How many there may be."""


class ModelQueueStatus(_Part):
    """What waits for a model now."""

    requests: int
    """Requests that wait."""
    rows: int
    """Their rows."""
    oldest_wait_s: float
    """For how long the first of them has waited."""
    inflight_batches: int
    """Batches that are staged, running or being answered."""


class ModelCounters(_Part):
    """What a model did since the process started."""

    requests: dict[str, int]
    """ModelInfer calls by gRPC status."""
    dispatches: int
    """Executions that succeeded."""
    served: int
    """Requests that they served."""
    rows: int
    """Rows that they served."""
    padding_rows: int
    """Rows that they computed for nobody."""
    by_batch_size: dict[str, int]
    """Executions by compiled batch size."""
    compute_seconds: float
    """Seconds of upload, execution and download."""
    errors: dict[str, int]
    """Executions that failed, by reason."""
    dropped: dict[str, int]
    """Requests that never ran, by reason."""


class QueueWait(_Part):
    """Wait before the launch, over the last 1024 requests."""

    p50: float
    """Half of them waited no longer."""
    p90: float
    """Nine of ten."""
    p99: float
    """99 of 100."""


class ModelStatus(_Part):
    """One registered model. What only a model that is ready has is null before."""

    name: str
    """The model's name."""
    kind: str | None
    """model; null before its manifest was read."""
    source: str
    """Who registered it: startup, watcher or api."""
    state: str
    """Of its registration: registered, preparing, ready, failed, retiring or release_failed."""
    admission: str
    """Its gate: open, draining (what was accepted is still being answered), drained or removing."""
    accepted: AcceptedRequests
    phase: str
    """What it does now: idle, queued, executing or loading (its weights are on their way to the device)."""
    reason: str
    """Why it does not answer; empty when it does."""
    error: ModelError | None
    """Set when it is failed."""
    pending_error: ModelError | None
    """Why the last reload failed; the version before it serves on, until its files change again."""
    incarnation: int
    """Number of the load that serves it; 0 = none yet. Every load and every reload of the process has its own."""
    directory: str
    """Its bundle."""
    modified: list[str]
    """Files that differ from the digests in the manifest."""
    weights_bytes: int | None
    """Bytes of its weights on the device, there or not."""
    residency: ModelResidency | None
    hooks: list[str]
    """Which hooks it has."""
    programs: ModelPrograms | None
    weight: float | None
    """Its share of the device under `fair`, relative to the others'."""
    recent_seconds: float | None
    """Device time that it used, decayed by half every `scheduler.ema_halflife_seconds`."""
    queue: ModelQueueStatus | None
    counters: ModelCounters | None
    batch_fill: float | None
    """Share of the computed rows that somebody had asked for; null before the first execution."""
    queue_wait_s: QueueWait | None
    cost_seconds: dict[str, float]
    """What a program is expected to take, by batch size (`8`), or by variant and batch size (`224x224/8`)."""


class TombstoneStatus(_Part):
    """A model that an operator removed while its directory is still there; it comes back when its files change."""

    name: str
    """The model's name."""
    signature: str
    """Of its files when it was removed."""
    since: float
    """When that was, in seconds since 1970."""


class WorkerStatus(_Part):
    """The whole document."""

    server: ServerStatus
    devices: list[DeviceStatus]
    models: list[ModelStatus]
    tombstones: list[TombstoneStatus]
