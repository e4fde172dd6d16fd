"""Every key of a gateway: its type, default, range and meaning. No files or variables are read here."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from rsrv.core.config.addresses import HostPort, parse_host_port, parse_worker_name
from rsrv.core.config.sections import Name, PositiveSeconds, Seconds, Section, Wanted

MAX_WORKERS = 256
"""Workers of one gateway. Each has channels and threads of its own; far more of them, most of all ones that are down,
and the gateway is busy with nothing else."""

Fraction = Annotated[float, Field(ge=0, le=1)]


def _folded(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


FOLDED = BeforeValidator(_folded)
"""Words are taken in any case and with blanks around them."""


def _listen_address(text: str) -> str:
    return str(parse_host_port(text, any_port=True))


def _worker_address(text: str) -> str:
    return str(parse_host_port(text))


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is not accepted; wanted the path of a file")
    return text


# Larger numbers fit neither into what gRPC takes for its options nor into the messages of the control plane.
_LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST)]
WholeSeconds = Annotated[int, Field(ge=1, le=10**9)]
FilePath = Annotated[str, AfterValidator(_path), Wanted("path of a file")]
WorkerName = Annotated[str, AfterValidator(parse_worker_name), Wanted("name of a worker")]
ListenAddress = Annotated[str, AfterValidator(_listen_address), Wanted("host:port")]
WorkerAddress = Annotated[str, AfterValidator(_worker_address), Wanted("host:port")]
Replicas = Count | Literal["all"]


class ListenConfig(Section):
    grpc: ListenAddress = "127.0.0.1:8001"
    """Address of gRPC; port 0 = the system chooses one, which is printed. IPv6 in brackets."""
    http: ListenAddress | None = "127.0.0.1:8002"
    """Address of health and metrics over HTTP; port 0 = the system chooses one, null = off."""
    max_connection_age_seconds: PositiveSeconds | None = None
    """Age at which a client's connection is told to go away, so that clients spread over new gateways. Unset: never."""
    max_connection_age_grace_seconds: Seconds = 30.0
    """How long calls on a connection that was told to go away may take to finish."""

    @property
    def grpc_address(self) -> HostPort:
        return parse_host_port(self.grpc, any_port=True)

    @property
    def http_address(self) -> HostPort | None:
        return None if self.http is None else parse_host_port(self.http, any_port=True)

    @model_validator(mode="after")
    def _addresses_differ(self) -> ListenConfig:
        if self.grpc == self.http and self.grpc_address.port:
            raise ValueError(f"grpc and http are both {self.grpc}; wanted two addresses that differ")
        return self


class WorkerClientConfig(Section):
    request_timeout_seconds: WholeSeconds = 60
    """Longest time for one request whose client set no deadline, and for calls that register shared memory."""
    max_concurrent_streams: Count = 32
    """Requests in progress at one worker; further ones wait their turn, within their deadline."""


def _capped(value: int) -> int:
    if value == 0:
        raise ValueError("0 means without limit, which needs the native engine, and that is not built yet; wanted ≥ 1")
    return value


CappedCount = Annotated[CountOrZero, AfterValidator(_capped), Wanted(f"integer, 1…{_LARGEST}")]


class GatewayGrpcConfig(Section):
    max_recv_msg_bytes: Count = 512 << 20
    """Largest message that is received, from clients and from workers."""
    max_send_msg_bytes: Count = 512 << 20
    """Largest message that is sent, to clients and to workers."""
    max_concurrent_requests_per_worker: CappedCount = 64
    """ModelInfer calls in progress at the gateway for each ready worker; one more is refused at once."""


class LoggingConfig(Section):
    level: Annotated[Literal["debug", "info", "warning", "error"], FOLDED] = "info"
    """The least that is logged."""
    format: Annotated[Literal["json", "text"], FOLDED] = "json"
    """A line of JSON per record, or of text."""


def _no_tls(value: str) -> str:
    if value:
        raise ValueError("server TLS is not implemented yet; leave the key out, and put a proxy that has TLS in front")
    return value


NoTlsYet = Annotated[str, AfterValidator(_no_tls), Wanted("string, empty")]


class TlsConfig(Section):
    cert_file: NoTlsYet = ""
    """Certificate of the server. Not implemented yet: any value is refused."""
    key_file: NoTlsYet = ""
    """Its key. Not implemented yet: any value is refused."""
    client_ca_file: NoTlsYet = ""
    """Authority that clients' certificates must come from. Not implemented yet: any value is refused."""


class ModelRoutingConfig(Section):
    replicas: Annotated[Replicas, FOLDED] | None = None
    """Workers that get this model's requests, or `all`. Unset: `scheduling.default_replicas`."""
    fill_mode: Annotated[Literal["inherit", "run", "spread", "inflight"], FOLDED] = "inherit"
    """How its requests are spread over its replicas; `inherit`: `scheduling.routing_fill_mode`."""
    fill_factor: Annotated[float, Field(gt=0)] | None = None
    """Largest batches that go to one replica before the next one. Unset: `scheduling.routing_fill_factor`."""


_OTHER_POLICIES = {
    "least_outstanding": "'least_outstanding' is a mode, not a policy; set scheduling.mode: least_outstanding",
}


def _policy(value: Any) -> Any:
    word = _folded(value)
    if isinstance(word, str) and word in _OTHER_POLICIES:
        raise ValueError(_OTHER_POLICIES[word])
    return word


class SchedulingConfig(Section):
    mode: Annotated[Literal["round_robin", "least_outstanding", "lpt_packing"], FOLDED] = "round_robin"
    """Which worker gets a request: the next one, the one with the least work, or one of those that the model was
    placed on, so that batches fill and weights stay resident."""
    work_basis: Annotated[Literal["compute", "items", "requests"], FOLDED] = "compute"
    """What work is counted in: measured device seconds, items (rows), or requests."""
    rebalance_compute_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Device seconds of the fleet from one placement to the next, under `lpt_packing`."""
    first_rebalance_compute_seconds: Annotated[float, Field(ge=0)] = 60.0
    """The same for the first one after the start; 0 = as for the others."""
    ema_halflife_compute_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Device seconds of the fleet after which what was measured counts half; 0 = `rebalance_compute_seconds`, as it is
    at the start."""
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share by which a model's worker may be worse than the best one before the model moves."""
    default_replicas: Annotated[Replicas, FOLDED] = 1
    """Workers that get a model's requests, or `all`."""
    routing_fill_factor: Annotated[float, Field(gt=0)] = 1.0
    """Largest batches of a model that go to one replica before the next one."""
    routing_policy: Annotated[Literal["fill_least", "fill_rr"], BeforeValidator(_policy)] = "fill_least"
    """Which replica is filled next: the one with the least work, or the next in order."""
    routing_fill_mode: Annotated[Literal["run", "spread", "inflight"], FOLDED] = "run"
    """How requests are spread over replicas: a run of items to one, each request on its own, or what is in flight."""
    forbid_memory_oversubscription: bool = True
    """Place no more weights on a worker than fit there, while any placement allows that."""
    compaction_mode: Annotated[Literal["off", "eager", "scheduled"], FOLDED] = "eager"
    """What workers whose models changed in a placement do about holes in device memory: nothing, free all weights that
    may be freed, or also load those that were placed there."""
    compaction_interval: CountOrZero = 1
    """Placements from one such compaction to the next; 0 = never."""
    max_worker_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Read by nothing; accepted, with a warning, for files of an older system."""
    models: dict[Name, ModelRoutingConfig] = Field(default={})
    """Settings of single models, by name."""

    @property
    def ema_halflife(self) -> float:
        """The half-life in compute seconds that holds at the start, > 0."""
        return self.ema_halflife_compute_seconds or self.rebalance_compute_seconds


def _forever(value: Any) -> Any:
    word = _folded(value)
    if word in ("inf", "forever") or (type(word) in (int, float) and word in (-1, math.inf)):
        return "forever"
    return value


class GatewayStartupConfig(Section):
    wait_seconds: Annotated[
        Seconds | Literal["forever"], BeforeValidator(_forever), Wanted("number, 0…1000000000.0, or forever")
    ] = 0.0
    """Longest time that a starting `lpt_packing` gateway waits for `lpt_min_workers`; `forever`, `inf` or -1: without
    limit."""

    @property
    def limit(self) -> float:
        """The same in seconds; infinity without limit."""
        return math.inf if self.wait_seconds == "forever" else float(self.wait_seconds)


class MembershipConfig(Section):
    file: FilePath | None = None
    """YAML file that lists workers, as it is at any time: addresses, or mappings of `endpoint`, `metrics`, `name`."""
    dns: WorkerAddress | None = None
    """host:port whose addresses are workers, all of them with this port."""
    dns_seconds: PositiveSeconds = 10.0
    """How often that name is looked up."""
    drain_seconds: Seconds = 30.0
    """How long a worker that a source no longer lists may finish what it has, before it is removed."""


class RetriesConfig(Section):
    ratio: Fraction = 0.1
    """Second attempts at other workers as a share of the requests of the last `window_seconds`, at most."""
    minimum: CountOrZero = 64
    """Second attempts that are allowed in that time however few requests there are."""
    window_seconds: PositiveSeconds = 10.0
    """Over which time both are counted."""
    hedge_after_seconds: PositiveSeconds | None = None
    """Ask a second worker when the first has not answered for so long, and take the first answer. Unset: never."""


class OutliersConfig(Section):
    consecutive_failures: CountOrZero = 5
    """Failures in a row after which a worker is asked last for a while; 0 = never."""
    eject_seconds: PositiveSeconds = 10.0
    """How long that is at first; each time in a row it is as long again."""
    max_eject_seconds: PositiveSeconds = 300.0
    """How long that is at most."""
    max_ejected_fraction: Fraction = 0.5
    """Share of the workers that may be out at a time."""
    cooldown_seconds: Seconds = 1.0
    """How long a worker that just failed a request is asked last."""
    slow_start_seconds: Seconds = 10.0
    """How long a worker that returns gets fewer requests than its share, more and more of them; 0 = all at once."""

    @model_validator(mode="after")
    def _longest_is_not_shorter(self) -> OutliersConfig:
        if self.max_eject_seconds < self.eject_seconds:
            raise ValueError(
                f"max_eject_seconds is {self.max_eject_seconds:g}; wanted at least eject_seconds, "
                f"which is {self.eject_seconds:g}"
            )
        return self


class ScrapeConfig(Section):
    total_seconds: PositiveSeconds = 4.0
    """Longest time for the metrics of all workers together, at each scrape."""
    retry_after_seconds: Seconds = 30.0
    """How long a metrics endpoint that refused is not asked again."""


class StaticWorker(NamedTuple):
    """A worker that the configuration lists: ``host:port`` of gRPC, of its metrics if there are any, and its name."""

    url: str
    metrics: str | None
    name: str


def _unblanked(value: Any) -> Any:
    """Without blanks around entries, blank ones and repetitions, in the order given."""
    if not isinstance(value, list):
        return value
    stripped = [item.strip() if isinstance(item, str) else item for item in value]
    return [item for at, item in enumerate(stripped) if item != "" and item not in stripped[:at]]


WorkerNames = Annotated[list[WorkerName], Wanted("list of names")]
WorkerAddresses = Annotated[list[WorkerAddress], BeforeValidator(_unblanked), Wanted("list of host:port")]


class GatewayConfig(Section):
    """The configuration of a gateway, as it stays for the life of the process."""

    listen: ListenConfig = ListenConfig()
    endpoints: WorkerAddresses = Field(default=[])
    """gRPC addresses of the workers. Required unless `membership` names where to find them."""
    metrics_endpoints: WorkerAddresses = Field(default=[])
    """HTTP addresses of the workers, in the same order; their metrics are part of the gateway's."""
    worker_names: WorkerNames = Field(default=[])
    """Names of the workers in metrics and logs, in the same order. Missing ones: the address."""
    worker_client: WorkerClientConfig = WorkerClientConfig()
    grpc: GatewayGrpcConfig = GatewayGrpcConfig()
    logging: LoggingConfig = LoggingConfig()
    tls: TlsConfig = TlsConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    control: bool | None = None
    """Answer calls that change the gateway. Unset: when `listen.grpc` is a loopback address."""
    state_file: FilePath | None = None
    """File in which what operators changed outlives a restart. Unset: it does not."""
    startup: GatewayStartupConfig = GatewayStartupConfig()
    lpt_min_workers: Count = 1
    """Workers that must answer before `lpt_packing` starts."""
    lame_duck_seconds: Seconds = 0.0
    """How long requests are still accepted after the gateway has stopped saying that it is ready."""
    health_interval_seconds: PositiveSeconds = 10.0
    """Seconds from one look at all workers to the next."""
    wedge_exit_rounds: CountOrZero = 3
    """Looks in a row at which every worker hangs, after which the gateway exits to be restarted; 0 = never."""
    membership: MembershipConfig = MembershipConfig()
    retries: RetriesConfig = RetriesConfig()
    outliers: OutliersConfig = OutliersConfig()
    scrape: ScrapeConfig = ScrapeConfig()

    @property
    def static_workers(self) -> tuple[StaticWorker, ...]:
        """The workers of `endpoints` with the metrics and the names of the same places in their lists."""
        rows = zip_longest(self.endpoints, self.metrics_endpoints, self.worker_names)
        return tuple(StaticWorker(url, metrics, name or url) for url, metrics, name in rows if url is not None)

    @property
    def warnings(self) -> list[str]:
        """What is legal and probably not meant."""
        found = []
        per_worker, streams = self.grpc.max_concurrent_requests_per_worker, self.worker_client.max_concurrent_streams
        if per_worker <= streams:
            found.append(
                f"grpc.max_concurrent_requests_per_worker ({per_worker}) is not above "
                f"worker_client.max_concurrent_streams ({streams}): requests are refused where they could wait"
            )
        if "max_worker_share" in self.scheduling.model_fields_set:
            found.append("scheduling.max_worker_share is read by nothing; remove it")
        if len(self.metrics_endpoints) > len(self.endpoints):
            found.append("metrics_endpoints has more entries than endpoints; the last ones belong to no worker")
        return found

    @field_validator("worker_names")
    @classmethod
    def _names_differ(cls, names: list[str]) -> list[str]:
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name!r} is there twice")
        return names

    @model_validator(mode="after")
    def _someone_to_ask(self) -> GatewayConfig:
        if not self.endpoints and self.membership.file is None and self.membership.dns is None:
            raise ValueError(
                "endpoints is empty; wanted at least one host:port, or where to find workers: membership.file or "
                "membership.dns"
            )
        if len(self.endpoints) > MAX_WORKERS:
            raise ValueError(f"endpoints has {len(self.endpoints)} entries; wanted at most {MAX_WORKERS}")
        if len(self.worker_names) > max(len(self.endpoints), len(self.metrics_endpoints)):
            raise ValueError(
                f"worker_names has {len(self.worker_names)} entries; wanted at most one for each of endpoints"
            )
        return self
