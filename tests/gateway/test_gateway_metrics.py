"""The series of a gateway, each where and when it is to be there, and the workers' metrics beside them."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import rsrv
from rsrv.core.config.gateway import OutliersConfig, RetriesConfig, SchedulingConfig
from rsrv.core.errors import Code, Shed
from rsrv.gateway.faces.overview import overview
from rsrv.gateway.metrics.counters import UNKNOWN, GatewayCounters
from rsrv.gateway.metrics.exposition import FORGET_SECONDS, GatewayMetrics
from rsrv.gateway.metrics.merge import read
from rsrv.gateway.metrics.series import PREFIX, SERIES
from rsrv.gateway.routing.admission import Admission
from rsrv.gateway.routing.retries import RetryBudget
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.routing.table import NotReady, RoutingTable
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.packing import LptPacking
from rsrv.gateway.scheduling.reports import ModelStatus, PackingStatus, ReplicaStatus, WorkerStatus
from rsrv.gateway.scheduling.simple import LeastOutstanding, RoundRobin
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.outcome import Outcome
from rsrv.gateway.workers.poll import ModelReport, Poll, WorkerReport


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Scrape:
    """What the workers' metrics endpoints say."""

    def __init__(self):
        self.up = {}
        self.found = {}

    def fetch(self):
        return self.found


class Gateway:
    """Everything that metrics look at, around two workers named worker0 and worker1."""

    def __init__(self, mode=None):
        self.clock = Clock()
        self.counters = GatewayCounters()
        self.fleet = Fleet(self._connect)
        self.standing = Standing(OutliersConfig(consecutive_failures=1), self.clock)
        self.router = Router(mode or RoundRobin(), self.standing)
        self.admission = Admission(64, lambda: len(self.fleet.ready))
        self.retries = RetryBudget(RetriesConfig(minimum=1), self.clock)
        self.scrape = Scrape()
        self.metrics = GatewayMetrics(
            self.fleet,
            self.router,
            self.counters,
            self.scrape,
            admission=self.admission,
            retries=self.retries,
            clock=self.clock,
        )
        for number in range(2):
            self.fleet.add(Endpoint(f"h:{number}", f"worker{number}"))

    @staticmethod
    def _connect(endpoint):
        return SimpleNamespace(
            url=endpoint.url,
            name=endpoint.name,
            metrics=endpoint.metrics,
            source=endpoint.source,
            ready=False,
            draining=False,
            incarnation="",
            discipline="",
            inflight=0,
            waiting=0,
            close=lambda: None,
        )

    def samples(self):
        """(name, labels) → value, of the whole text; a sample that is there twice is an error."""
        found = {}
        for family in text_string_to_metric_families(self.metrics.text().decode()):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        return found

    def value(self, name, **labels):
        """None when it is not there."""
        return self.samples().get((PREFIX + name, tuple(sorted(labels.items()))))

    def names(self):
        return {name for name, _ in self.samples()}


@pytest.fixture
def gateway():
    return Gateway()


def test_an_idle_gateway_says_what_it_is_and_who_there_is(gateway):
    ((_, labels),) = [key for key in gateway.samples() if key[0] == f"{PREFIX}build_info"]
    assert dict(labels)["version"] == rsrv.__version__
    assert dict(labels)["mode"] == "round_robin"
    assert gateway.value("worker_ready", worker="worker0") == 0
    assert gateway.value("inflight_requests") == 0
    assert gateway.value("routing_table_size") == 0
    assert gateway.value("max_concurrent_requests") == 64
    assert "process_resident_memory_bytes" in gateway.names()


def test_calls_are_told_by_status_and_take_time(gateway):
    gateway.counters.finished("ModelInfer", "m", "OK", 0.0015)
    gateway.counters.finished("ModelInfer", "m", "OK", 50.0)
    gateway.counters.finished("ModelInfer", UNKNOWN, "NotFound", 0.1)
    gateway.counters.finished("IsSameIPCNamespace", "", "OK", 0.1)
    gateway.counters.failover("m", "stopping")
    gateway.counters.hedged()
    assert gateway.value("requests_total", rpc="ModelInfer", model="m", status="OK") == 2
    assert gateway.value("requests_total", rpc="ModelInfer", model="_unknown_", status="NotFound") == 1
    assert gateway.value("requests_total", rpc="IsSameIPCNamespace", model="", status="OK") == 1
    labels = {"rpc": "ModelInfer", "model": "m"}
    assert gateway.value("request_latency_seconds_bucket", **labels, le="0.001") == 0
    assert gateway.value("request_latency_seconds_bucket", **labels, le="0.002") == 1
    assert gateway.value("request_latency_seconds_bucket", **labels, le="8.192") == 1
    assert gateway.value("request_latency_seconds_bucket", **labels, le="65.536") == 2
    assert gateway.value("request_latency_seconds_bucket", **labels, le="+Inf") == 2
    assert gateway.value("request_latency_seconds_sum", **labels) == 50.0015
    assert gateway.value("request_latency_seconds_count", **labels) == 2
    assert gateway.value("failovers_total", model="m", reason="stopping") == 1
    assert gateway.value("hedges_total") == 1


def test_workers_are_told_by_their_names(gateway):
    gateway.fleet.add(Endpoint("h:2"))
    gateway.fleet.probed("h:0", True)
    gateway.fleet.drain("h:1")
    gateway.counters.worker_call("ModelInfer", "h:0", 0.25)
    gateway.counters.worker_call("ModelInfer", "h:2", 0.5)
    gateway.counters.queue_wait("h:0", 0.125)
    gateway.counters.ejected("h:1")
    gateway.fleet.get("h:0").inflight, gateway.fleet.get("h:0").waiting = 3, 2
    assert [gateway.value("worker_ready", worker=name) for name in ("worker0", "worker1", "h:2")] == [1, 0, 0]
    assert [gateway.value("worker_draining", worker=name) for name in ("worker0", "worker1", "h:2")] == [0, 1, 0]
    assert gateway.value("worker_latency_seconds_sum", rpc="ModelInfer", worker="worker0") == 0.25
    assert gateway.value("worker_latency_seconds_sum", rpc="ModelInfer", worker="h:2") == 0.5
    assert gateway.value("worker_queue_wait_seconds_sum", worker="worker0") == 0.125
    assert gateway.value("worker_ejections_total", worker="worker1") == 1
    assert gateway.value("worker_inflight_requests", worker="worker0") == 3
    assert gateway.value("worker_waiting_requests", worker="worker0") == 2


def test_a_worker_that_is_out_for_its_failures_shows_so(gateway):
    gateway.router.joined("h:0", slowly=False)
    gateway.router.joined("h:1", slowly=False)
    gateway.router.failed("h:0", "m", Outcome(Code.UNAVAILABLE))
    assert [gateway.value("worker_ejected", worker=f"worker{number}") for number in (0, 1)] == [1, 0]
    gateway.clock.now += 11.0
    assert gateway.value("worker_ejected", worker="worker0") == 0


def test_the_cap_follows_the_ready_workers_and_what_it_refuses_is_counted(gateway):
    gateway.fleet.probed("h:0", True)
    gateway.fleet.probed("h:1", True)
    assert gateway.value("max_concurrent_requests") == 128
    for _ in range(128):
        gateway.admission.enter()
    with pytest.raises(Shed):
        gateway.admission.enter()
    assert gateway.value("inflight_requests") == 128
    assert gateway.value("requests_shed_total") == 1


def test_second_attempts_and_those_that_the_budget_refused_are_counted(gateway):
    assert [gateway.retries.take(), gateway.retries.take()] == [True, False]
    assert gateway.value("retries_total") == 1
    assert gateway.value("retries_refused_total") == 1


def test_the_size_of_the_table_counts_only_models_that_somebody_serves(gateway):
    gateway.router.install(RoutingTable({"a": ["h:0"], "b": ["h:0", "h:1"]}, {"c": NotReady("failed", "no")}))
    assert gateway.value("routing_table_size") == 2
    assert gateway.value("models_not_ready") == 1


def test_the_workers_metrics_come_below_and_their_state_above(gateway):
    gateway.scrape.found = {"h:0": read("# TYPE rsrv_worker_x gauge\nrsrv_worker_x 7\nprocess_open_fds 3\n", "worker0")}
    gateway.scrape.up = {"h:0": True, "h:1": False}
    samples = gateway.samples()
    assert samples["rsrv_worker_x", (("worker", "worker0"),)] == 7
    assert samples["process_open_fds", (("worker", "worker0"),)] == 3
    assert ("process_open_fds", ()) in samples
    assert gateway.value("worker_metrics_up", worker="worker0") == 1
    assert gateway.value("worker_metrics_up", worker="worker1") == 0
    text = gateway.metrics.text()
    assert text.index(b"rsrv_gateway_worker_ready") < text.index(b"rsrv_worker_x")


def test_without_metrics_endpoints_there_is_no_series_about_them(gateway):
    assert f"{PREFIX}worker_metrics_up" not in gateway.names()


# --- who has left --------------------------------------------------------------------------------------------------


def test_a_worker_that_left_has_no_series_even_when_a_call_to_it_ends_later(gateway):
    gateway.counters.worker_call("ModelInfer", "h:0", 0.1)
    gateway.fleet.remove("h:0")
    gateway.counters.worker_call("ModelInfer", "h:0", 0.1)
    gateway.counters.queue_wait("h:0", 0.1)
    assert not any(("worker", value) in labels for _, labels in gateway.samples() for value in ("worker0", "h:0"))
    assert gateway.counters.snapshot().workers == frozenset()


def test_a_model_keeps_its_series_for_an_hour_after_the_last_worker_forgot_it(gateway):
    gateway.router.install(RoutingTable({"a": ["h:0"], "b": ["h:0"]}))
    for model in ("a", "b", UNKNOWN):
        gateway.counters.finished("ModelInfer", model, "Unavailable", 0.1)
    labels = {"rpc": "ModelInfer", "status": "Unavailable"}
    gateway.router.install(RoutingTable({"b": ["h:0"]}))
    assert gateway.value("requests_total", model="a", **labels) == 1
    gateway.clock.now += FORGET_SECONDS / 2
    gateway.router.install(RoutingTable({"a": ["h:0"], "b": ["h:0"]}))
    assert gateway.value("requests_total", model="a", **labels) == 1
    gateway.router.install(RoutingTable({}, {"b": NotReady("preparing", "")}))
    assert gateway.value("requests_total", model="a", **labels) == 1
    gateway.clock.now += FORGET_SECONDS - 1
    assert gateway.value("requests_total", model="a", **labels) == 1
    gateway.clock.now += 2
    gateway.metrics.text()
    assert gateway.value("requests_total", model="a", **labels) is None
    assert gateway.value("requests_total", model="b", **labels) == 1
    assert gateway.value("requests_total", model=UNKNOWN, **labels) == 1


# --- the load that workers are compared by --------------------------------------------------------------------------


def least_outstanding(basis, cost=0.5):
    """One that knows: 4 items took 4 × `cost` device seconds."""
    mode = LeastOutstanding(basis)
    for served in (0, 4):
        row = ModelReport(compute=served * cost, requests=served, rows=served, max_batch=8)
        mode.tick(["h:0"], Poll({"h:0": WorkerReport("h:0", {"m": row})}), 1.0 + served)
    return mode


def test_the_load_is_absent_under_round_robin_and_before_any_counter_exists():
    for mode in (RoundRobin(), LeastOutstanding("items")):
        assert f"{PREFIX}worker_inflight_work" not in Gateway(mode).names()


def test_the_load_is_read_live_and_shows_all_workers():
    """Worked example of spec gateway-node 4.1: 4 items × 0.5 device seconds."""
    gateway = Gateway(least_outstanding("compute"))
    mode = gateway.router.mode
    choice = mode.select("m", 4, ["h:0", "h:1"], ())
    assert choice.urls[0] == "h:0"
    assert gateway.value("worker_inflight_work", worker="worker0", basis="compute") == 2
    assert gateway.value("worker_inflight_work", worker="worker1", basis="compute") == 0
    mode.release(choice.reservation)
    assert gateway.value("worker_inflight_work", worker="worker0", basis="compute") == 0


def test_one_request_of_seven_items_counts_seven_under_items():
    gateway = Gateway(LeastOutstanding("items"))
    gateway.router.mode.select("m", 7, ["h:0", "h:1"], ())
    assert gateway.value("worker_inflight_work", worker="worker0", basis="items") == 7


# --- placements ----------------------------------------------------------------------------------------------------


def model_status(name, *replicas, **fields):
    values = {
        "configured_replicas": None,
        "utilization": 0.0,
        "arrival_rate": 0.0,
        "cost_seconds": 0.0,
        "max_batch": 0,
        "fill_mode": "run",
        "fill_quantum": 0,
        "weight_nbytes": 0,
        "placed": True,
        "drifted": False,
    }
    return ModelStatus(name=name, replicas=replicas, **{**values, **fields})


class Placed(LptPacking):
    """The mode with a placement of our own."""

    def __init__(self, **fields):
        super().__init__(Knobs.from_config(SchedulingConfig()))
        values = {
            "knobs": self.knobs,
            "tick": None,
            "repack": None,
            "requested": 0,
            "completed": 0,
            "repacks": {"startup": 1, "compute": 3, "operator": 0, "membership": 0, "models": 0},
            "since_compaction": 0,
            "models": (),
            "workers": (),
            "warnings": (),
        }
        self.given = PackingStatus(**{**values, **fields})

    def status(self):
        return self.given

    def inflight_work(self):
        return None


def test_a_placement_is_told_by_model_and_worker():
    halves = (ReplicaStatus("h:0", 0.5, 4, 100), ReplicaStatus("h:1", 0.5, 0, 90))
    gateway = Gateway(
        Placed(
            models=(
                model_status("a", *halves, utilization=0.25, fill_quantum=32),
                model_status("b", ReplicaStatus("h:1", 1.0, 0, 0)),
                model_status("cold", placed=False),
            ),
            workers=(WorkerStatus("h:0", True, 1, 0.0, 900, 1000), WorkerStatus("h:1", True, 2, 0.0, 50, 0)),
        )
    )
    gateway.router.install(RoutingTable({model: ["h:0", "h:1"] for model in ("a", "b", "cold")}))
    weights = {
        (model, worker): gateway.value("placement_weight", model=model, worker=worker)
        for model in ("a", "b", "cold")
        for worker in ("worker0", "worker1")
    }
    assert weights == {
        ("a", "worker0"): 0.5,
        ("a", "worker1"): 0.5,
        ("b", "worker0"): 0,
        ("b", "worker1"): 1,
        ("cold", "worker0"): 0,
        ("cold", "worker1"): 0,
    }
    assert gateway.value("model_utilization", model="a") == 0.25
    assert [gateway.value("model_replicas", model=model) for model in ("a", "b", "cold")] == [2, 1, 0]
    assert gateway.value("model_fill_quantum", model="a") == 32
    assert gateway.value("replica_outstanding", model="a", worker="worker0") == 4
    assert gateway.value("replica_routed_total", model="a", worker="worker1") == 90
    assert gateway.value("repacks_total", trigger="compute") == 3
    assert gateway.value("repacks_total", trigger="models") == 0
    assert gateway.value("worker_assigned_bytes", worker="worker0") == 900
    assert gateway.value("worker_budget_bytes", worker="worker0") == 1000


def test_a_replica_that_is_no_more_shows_0_and_one_at_a_worker_that_left_shows_nothing():
    gateway = Gateway(
        Placed(
            models=(model_status("a", ReplicaStatus("h:0", 1.0, 0, 1), ReplicaStatus("gone:1", 0.0, 1, 1)),),
            retired=frozenset({("a", "h:1"), ("unloaded", "h:0"), ("unloaded", "gone:1")}),
        )
    )
    assert gateway.value("placement_weight", model="a", worker="worker1") == 0
    assert gateway.value("placement_weight", model="unloaded", worker="worker0") == 0
    assert not any("gone" in value for _, labels in gateway.samples() for _, value in labels)


def test_a_mode_without_a_placement_tells_of_none(gateway):
    gateway.router.install(RoutingTable({"a": ["h:0"]}))
    assert not {f"{PREFIX}{name}" for name in ("placement_weight", "model_replicas", "repacks_total")} & gateway.names()


def test_the_mode_itself_fills_these_series():
    mode = LptPacking(Knobs.from_config(SchedulingConfig()), clock=lambda: 1.7e9)
    gateway = Gateway(mode)
    gateway.router.install(RoutingTable({"a": ["h:0", "h:1"]}))
    row = ModelReport(compute=1.0, requests=4, rows=4, weight_nbytes=10, max_batch=8)
    poll = Poll({url: WorkerReport(url, {"a": row}) for url in ("h:0", "h:1")})
    mode.start(["h:0", "h:1"], poll, 1.0)
    weights = [gateway.value("placement_weight", model="a", worker=f"worker{number}") for number in (0, 1)]
    assert sum(weights) == 1
    assert gateway.value("repacks_total", trigger="startup") == 1
    assert gateway.value("model_replicas", model="a") == sum(weight > 0 for weight in weights)


# --- the table and the page for people ------------------------------------------------------------------------------


def test_every_series_of_the_table_is_exported_and_no_other():
    gateway = Gateway(Placed(models=(model_status("a", ReplicaStatus("h:0", 1.0, 0, 1)),)))
    mode = gateway.router.mode
    mode.inflight_work = lambda: ("items", {"h:0": 1.0})
    report = SimpleNamespace(moved=("a",))
    mode.given = PackingStatus(
        **{
            **vars(mode.given),
            "repack": report,
            "workers": (WorkerStatus("h:0", True, 1, 0.0, 900, 1000),),
        }
    )
    gateway.counters.finished("ModelInfer", "a", "OK", 0.1)
    gateway.counters.worker_call("ModelInfer", "h:0", 0.1)
    gateway.counters.queue_wait("h:0", 0.1)
    gateway.counters.failover("a", "stopping")
    gateway.counters.ejected("h:0")
    gateway.scrape.up = {"h:0": True}
    text = gateway.metrics.text().decode()
    exported = [line.split()[2] for line in text.splitlines() if line.startswith(f"# TYPE {PREFIX}")]
    assert exported == [f"{PREFIX}{name}" for name in SERIES]


def test_the_page_for_people_shows_workers_requests_and_what_is_wrong(gateway):
    gateway.fleet.probed("h:0", True)
    gateway.router.install(RoutingTable({"a": ["h:0"]}, {"b": NotReady("failed", "bad weights")}))
    gateway.counters.ejected("h:1")
    page = overview(
        gateway.fleet,
        gateway.router,
        gateway.counters,
        admission=gateway.admission,
        retries=gateway.retries,
        ready=True,
    )
    assert (page["mode"], page["ready"], page["version"]) == ("round_robin", True, rsrv.__version__)
    assert [(row["name"], row["url"], row["ready"], row["ejections"]) for row in page["workers"]] == [
        ("worker0", "h:0", True, 0),
        ("worker1", "h:1", False, 1),
    ]
    assert page["models"] == {"routable": 1, "not_ready": {"b": {"reason": "failed", "text": "bad weights"}}}
    assert page["requests"] == {"inflight": 0, "cap": 64, "shed": 0, "retries": 0, "retries_refused": 0, "hedges": 0}
    assert page["warnings"] == ["worker worker1 is not ready", "1 models are registered at workers and served by none"]
    assert "placement" not in page


def test_the_page_for_people_shows_the_placement_by_names():
    gateway = Gateway(
        Placed(models=(model_status("a", ReplicaStatus("h:1", 1.0, 0, 1)),), warnings=("model b has drifted",))
    )
    page = overview(
        gateway.fleet,
        gateway.router,
        gateway.counters,
        admission=gateway.admission,
        retries=gateway.retries,
        ready=False,
    )
    assert page["placement"]["models"] == {"a": [{"worker": "worker1", "weight": 1.0}]}
    assert page["placement"]["repacks"]["compute"] == 3
    assert page["warnings"] == ["no worker is ready", "model b has drifted"]
