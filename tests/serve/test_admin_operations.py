"""The rows of the table of operations, over HTTP: what each changes, what it answers, and how it refuses."""

import threading

import pytest
from admin_support import WAIT, Site

from rsrv.core.errors import CapacityFull, ExpectedMismatch, InvalidRequest, UnknownModel, WrongState
from rsrv.serve.registry import ModelState, Settings
from rsrv.serve.repository.diff import Change
from rsrv.serve.residency.floors import Floor


@pytest.fixture
def make(tmp_path):
    sites = []

    def build(**options):
        sites.append(Site(tmp_path, **options))
        return sites[-1]

    yield build
    for site in sites:
        site.close()


@pytest.fixture
def site(make):
    return make()


def reason(answer):
    status, body = answer
    return status, body["error"]["reason"]


MUTATING = [
    ("models/register", {"directory": "net"}),
    ("models/retry", {}),
    ("models/drain", {}),
    ("models/undrain", {}),
    ("models/unregister", {}),
    ("models/activate", {}),
    ("models/deactivate", {}),
    ("models/pin", {}),
    ("models/unpin", {}),
    ("models/residency", {"floor": "device"}),
    ("models/programs", {"base_directory": "net"}),
    ("models/programs/select", {"program": 1, "expected": 1}),
    ("models/programs/remove", {"program": 1}),
    ("models/programs/shadow", {"program": 1, "percent": 1}),
]
OF_A_MODEL = [row for row in MUTATING if row[0] != "models/register"]


# --- what holds for all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "fields"), OF_A_MODEL)
def test_an_unknown_name_is_not_found(site, path, fields):
    assert reason(site.post(path, model="nobody", **fields)) == (404, "unknown_model")


@pytest.mark.parametrize(("path", "fields"), OF_A_MODEL)
def test_another_incarnation_than_the_expected_is_a_conflict_and_the_answer_has_the_real_one(site, path, fields):
    entry = site.put()
    status, body = site.post(path, model="net", if_incarnation=entry.incarnation + 1, **fields)
    assert (status, body["error"]["reason"], body["error"]["code"]) == (409, "incarnation_changed", "ABORTED")
    assert (body["model"], body["incarnation"]) == ("net", entry.incarnation)


def test_the_right_incarnation_is_let_through(site):
    entry = site.put()
    assert site.post("models/drain", model="net", if_incarnation=entry.incarnation)[0] == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [*MUTATING, ("devices/trim", {}), ("repository/poll", {}), ("models/register", {"directory": "/"})],
)
def test_a_server_that_stops_changes_nothing(site, path, fields):
    site.put()
    site.lifecycle.enter("stopping")
    model = {} if path in ("devices/trim", "repository/poll") else {"model": "net"}
    assert reason(site.post(path, **model, **fields)) == (503, "stopping")
    assert site.registrations.calls == []


@pytest.mark.parametrize(("path", "fields"), MUTATING)
def test_an_unknown_field_is_refused(site, path, fields):
    status, body = site.post(path, model="net", **fields, modell="x")
    assert (status, body["error"]["reason"]) == (400, "invalid")
    assert body["error"]["message"] == "unknown field 'modell'"
    assert body["error"]["hint"] == "did you mean 'model'?"


@pytest.mark.parametrize("path", ["models/drain", "models/activate", "models/pin", "models/programs/select"])
def test_a_component_is_refused_as_there_are_no_meta_models(site, path):
    site.put()
    fields = {"program": 1, "expected": 1} if path.endswith("select") else {}
    status, body = site.post(path, model="net", component="part", **fields)
    assert (status, body["error"]["reason"]) == (400, "invalid")
    assert "component 'part' of model 'net': a component needs meta models" in body["error"]["message"]


# --- status and catalogue -----------------------------------------------------------------------------------------


def test_the_catalogue_has_the_prepared_models_and_none_that_is_being_removed(site):
    site.put("drained", "ready", "drained")
    site.put("going", "retiring")
    site.put("preparing", "preparing")
    site.put("failed", "failed")
    status, body = site.get("models")
    assert status == 200
    assert body == {
        "models": [
            {
                "name": "drained",
                "incarnation": 1,
                "kind": "model",
                "admission": "drained",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
                "batch_sizes": [1, 8],
                "shape_variants": [[]],
                "platform": "xla_stablehlo",
            }
        ]
    }


# --- register, retry, unregister ----------------------------------------------------------------------------------


def test_register_prepares_and_is_accepted(site):
    directory = site.bundle("net")
    status, body = site.post("models/register", model="net", directory=str(directory))
    assert (status, body["registration"], body["admission"], body["underway"]) == (202, "preparing", "open", True)
    assert body["incarnation"] == site.entry().incarnation
    assert site.registrations.calls == [("register", "net", directory, "api", "open", Settings())]


def test_register_takes_settings_over_the_configuration(site):
    site.bundle("net")
    status, body = site.post(
        "models/register",
        model="net",
        directory="net",
        admission="drained",
        residency="device",
        weight=2,
        max_batch_size=4,
        pinned=True,
    )
    assert (status, body["registration"], body["admission"], body["pinned"]) == (202, "registered", "drained", True)
    assert site.registrations.calls[0][4:] == ("drained", Settings(Floor.DEVICE, 2.0, 4, True))


@pytest.mark.parametrize(
    ("directory", "text"),
    [
        ("{root}/none", "is not there"),
        ("{root}/empty", "has no manifest.yaml"),
        ("{root}/file", "is no directory"),
        ("none", "there is no directory 'none' under"),
        ("/", "is not under"),
        ("{root}", "is not under"),
        ("{root}/../outside", "is not under"),
        ("{root}/net/../../outside", "is not under"),
    ],
)
def test_a_directory_that_is_no_bundle_of_the_repository_is_refused(make, tmp_path, directory, text):
    root = tmp_path / "repository"
    root.mkdir()
    site = make()
    site.config.model_dirs[:] = [str(root)]
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "manifest.yaml").write_text("")
    status, body = site.post("models/register", model="net", directory=directory.format(root=root))
    assert (status, body["error"]["code"]) == (400, "INVALID_ARGUMENT")
    assert text in body["error"]["message"]
    assert site.registrations.calls == []


def test_a_directory_elsewhere_is_taken_when_the_configuration_allows_it(make, tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    site = make(admin={"allow_external_dirs": True})
    site.config.model_dirs[:] = [str(root)]
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "manifest.yaml").write_text("")
    assert site.post("models/register", model="net", directory=str(tmp_path / "net"))[0] == 202


@pytest.mark.parametrize("name", [".hidden", "a/b", "..", "a\\b", "a.tmp"])
def test_a_name_that_no_bundle_can_have_is_refused(site, name):
    site.bundle("net")
    assert reason(site.post("models/register", model=name, directory="net")) == (400, "invalid")


@pytest.mark.parametrize("path", ["models/register", "models/unregister"])
def test_a_static_server_keeps_its_models(make, path):
    site = make(mode="static")
    site.bundle("other")
    site.put("net")
    fields = {"directory": "other", "model": "other"} if path.endswith("/register") else {"model": "net"}
    status, body = site.post(path, **fields)
    assert (status, body["error"]["reason"]) == (409, "static")
    assert site.registrations.calls == []


def test_register_for_an_incarnation_fails_when_the_name_is_free(site):
    site.bundle("net")
    assert reason(site.post("models/register", model="net", directory="net", if_incarnation=7)) == (
        409,
        "incarnation_changed",
    )


def test_a_full_registry_is_a_bound(site, monkeypatch):
    site.bundle("net")

    def full(*args, **kwargs):
        raise CapacityFull("1024 models are registered", reason="model_capacity")

    monkeypatch.setattr(site.registrations, "register", full)
    assert reason(site.post("models/register", model="net", directory="net")) == (429, "model_capacity")


def test_unregister_drains_unless_it_is_told_to_abort(site):
    site.put()
    status, body = site.post("models/unregister", model="net")
    assert (status, body["registration"], body["admission"], body["underway"]) == (202, "retiring", "removing", True)
    assert site.post("models/unregister", model="net", mode="abort")[0] == 202
    assert [call[2] for call in site.registrations.calls] == ["drain", "abort"]
    assert reason(site.post("models/unregister", model="net", mode="now")) == (400, "invalid")


def test_retry_tells_of_the_preparation(site):
    site.put("net", "failed")
    status, body = site.post("models/retry", model="net")
    assert (status, body["registration"], body["error"]) == (202, "preparing", "")


# --- drain and undrain --------------------------------------------------------------------------------------------


def test_drain_with_requests_in_flight_reports_draining_until_there_is_none(site):
    entry = site.put(accepted=3)
    site.depth, site.registrations.earlier = (1, 1), 2
    status, body = site.post("models/drain", model="net")
    assert (status, body["admission"]) == (200, "draining")
    assert body["accepted"] == {"queued": 1, "executing": 1, "hooks": 1, "earlier": 2}
    for request in entry.prepared.accepted.requests():
        entry.prepared.accepted.leave(request)
    site.depth, site.registrations.earlier = (0, 0), 0
    site.registry.change("net", gate="drained")
    status, body = site.post("models/drain", model="net")
    assert (status, body["admission"]) == (200, "drained")
    assert body["accepted"] == {"queued": 0, "executing": 0, "hooks": 0, "earlier": 0}


def test_drain_may_wait_until_the_requests_are_done(site):
    site.put(accepted=1)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(site.post("models/drain", model="net", wait_ms=60_000)))
    waiting.start()
    site.until(lambda: site.entry().gate == "draining")
    site.registry.change("net", gate="drained")
    waiting.join(WAIT)
    assert [(status, body["admission"]) for status, body in answers] == [(200, "drained")]


def test_drain_that_waited_long_enough_answers_what_is(site):
    site.put(accepted=1)
    status, body = site.post("models/drain", model="net", wait_ms=1)
    assert (status, body["admission"]) == (200, "draining")


def test_a_drain_that_cannot_wait_changes_nothing(make):
    site = make(admission={"held_requests": 0})
    site.put(accepted=1)
    assert reason(site.post("models/drain", model="net", wait_ms=1000)) == (429, "held_full")
    assert site.entry().gate == "open"


def test_undrain_opens_and_prepares_what_is_only_registered(site):
    site.put("net", "registered", "drained")
    status, body = site.post("models/undrain", model="net")
    assert (status, body["admission"], body["registration"]) == (200, "open", "preparing")


@pytest.mark.parametrize("operation", ["drain", "undrain"])
def test_the_gate_may_be_told_twice(site, operation):
    site.put()
    first = site.post(f"models/{operation}", model="net")
    assert first[0] == 200
    assert site.post(f"models/{operation}", model="net") == first


# --- waiting ------------------------------------------------------------------------------------------------------


def test_wait_returns_when_the_model_is_there(site):
    site.put("net", "preparing")
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(site.get("models/wait?model=net&until=ready&timeout_ms=60000"))
    )
    waiting.start()
    site.until(lambda: site.admission._places == 1)
    site.registry.change("net", state=ModelState.READY)
    waiting.join(WAIT)
    assert [(status, body["registration"]) for status, body in answers] == [(200, "ready")]
    assert site.admission._places == 0


def test_wait_until_gone_ends_when_the_name_is_removed(site):
    site.put("net", "retiring")
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(site.get("models/wait?model=net&until=gone&timeout_ms=60000"))
    )
    waiting.start()
    site.until(lambda: site.admission._places == 1)
    site.registry.remove("net")
    waiting.join(WAIT)
    assert [(status, body["registration"]) for status, body in answers] == [(200, "gone")]
    assert site.get("models/wait?model=net&until=gone&timeout_ms=0")[1]["registration"] == "gone"


def test_a_wait_ends_after_its_time(site):
    site.put("net", "preparing")
    assert reason(site.get("models/wait?model=net&until=ready&timeout_ms=1")) == (408, "wait_timeout")


def test_waiting_calls_share_the_places_of_held_requests(make):
    site = make(admission={"held_requests": 1})
    site.put("net", "preparing")
    with site.admission.place("a test"):
        assert reason(site.get("models/wait?model=net&until=ready&timeout_ms=1000")) == (429, "held_full")


def test_a_wait_ends_when_the_server_stops(site):
    site.put("net", "preparing")
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(site.get("models/wait?model=net&until=ready&timeout_ms=600000"))
    )
    waiting.start()
    site.until(lambda: site.admission._places == 1)
    site.lifecycle.enter("stopping")
    waiting.join(WAIT)
    assert [reason(answer) for answer in answers] == [(503, "stopping")]


@pytest.mark.parametrize(
    "query",
    [
        "until=ready&timeout_ms=1",
        "model=net&timeout_ms=1",
        "model=net&until=ready",
        "model=net&until=cold&timeout_ms=1",
        "model=net&until=ready&timeout_ms=-1",
        "model=net&until=ready&timeout_ms=3600001",
        "model=net&until=ready&timeout_ms=x",
    ],
)
def test_a_wait_for_nothing_is_refused(site, query):
    site.put()
    assert reason(site.get(f"models/wait?{query}")) == (400, "invalid")


# --- weights ------------------------------------------------------------------------------------------------------


def test_activate_brings_the_weights_and_runs_each_program(site):
    site.put(gate="drained")
    status, body = site.post("models/activate", model="net")
    assert (status, body["underway"]) == (202, True)
    site.until(lambda: site.warmed == ["net"])
    site.until(lambda: not site.operations.busy("net"))
    assert ("activate", "net") in site.residency.calls
    assert site.entry().gate == "drained"


def test_activate_of_a_registered_model_prepares_it_first(site):
    site.put("net", "registered", "drained")
    status, body = site.post("models/activate", model="net")
    assert (status, body["registration"], body["parameter_operation"]) == (202, "preparing", "waiting")
    assert site.residency.calls == []
    site.residency.places["net"] = site.residency.places.get("net") or type("Place", (), {"pinned": False})()
    site.registrations.preparations["net"].set_result(site.entry())
    site.until(lambda: site.warmed == ["net"])


def test_activate_of_what_fails_to_prepare_keeps_the_error(site):
    site.put("net", "registered", "drained")
    site.post("models/activate", model="net")
    site.registrations.preparations["net"].set_exception(InvalidRequest("no such op"))
    site.until(lambda: not site.operations.busy("net"))
    status, body = site.post("models/drain", model="net")
    assert (status, body["parameter_operation"]) == (200, "idle")
    assert "no such op" in body["error"]


@pytest.mark.parametrize("gate", ["open", "draining"])
@pytest.mark.parametrize("operation", ["activate", "deactivate"])
def test_weights_are_moved_behind_a_closed_gate(site, operation, gate):
    site.put(gate=gate)
    assert reason(site.post(f"models/{operation}", model="net")) == (409, "not_drained")
    assert site.residency.calls == []


def test_activate_at_an_open_gate_must_be_said(site):
    site.put(gate="open")
    assert site.post("models/activate", model="net", allow_open=True)[0] == 202


def test_one_operation_at_a_time(site):
    site.put(gate="drained")
    site.residency.gate.clear()
    assert site.post("models/activate", model="net")[0] == 202
    for operation in ("activate", "deactivate"):
        assert reason(site.post(f"models/{operation}", model="net")) == (409, "operation_pending")
    site.until(lambda: site.operations.state("net").operation == "activating")
    assert site.post("models/drain", model="net")[1]["parameter_operation"] == "activating"
    site.residency.gate.set()


def test_deactivate_frees_the_device_and_with_host_the_copy(site):
    site.put(gate="drained")
    assert site.post("models/deactivate", model="net")[0] == 202
    site.until(lambda: ("deactivate", "net", False) in site.residency.calls)
    site.until(lambda: not site.operations.busy("net"))
    assert site.post("models/deactivate", model="net", host=True)[0] == 202
    site.until(lambda: ("deactivate", "net", True) in site.residency.calls)


@pytest.mark.parametrize("pinned", [{"pinned": True}, {"floor": Floor.DEVICE}])
def test_deactivate_of_a_pinned_model_is_refused(site, pinned):
    site.put(gate="drained", **pinned)
    assert reason(site.post("models/deactivate", model="net")) == (409, "pinned")


def test_without_a_budget_nothing_leaves_the_device(site):
    site.put(gate="drained")
    site.residency.on_demand = False
    assert reason(site.post("models/deactivate", model="net")) == (409, "fixed")
    assert reason(site.post("devices/trim")) == (409, "fixed")
    assert reason(site.post("devices/trim", compact=True)) == (409, "fixed")


def test_pin_and_unpin_are_told_and_noted(site):
    site.put()
    assert site.post("models/pin", model="net")[1]["pinned"] is True
    assert site.post("models/pin", model="net")[1]["pinned"] is True
    assert site.residency.places["net"].pinned
    assert site.post("models/unpin", model="net")[1]["pinned"] is False
    noted = [(event.type, event.old, event.new) for event in site.events.read()[0]]
    assert noted == [("pinned", "false", "true"), ("pinned", "true", "false")]


def test_a_model_without_weights_remembers_its_pin(site):
    site.put("net", "registered", "drained")
    assert site.post("models/pin", model="net")[1]["pinned"] is True
    assert site.entry().settings.pinned


def test_pin_while_the_weights_leave_is_refused(site):
    site.put(gate="drained")
    site.residency.gate.clear()
    site.post("models/deactivate", model="net")
    site.until(lambda: site.operations.state("net").operation == "deactivating")
    assert reason(site.post("models/pin", model="net")) == (409, "operation_pending")
    site.residency.gate.set()


def test_the_floor_is_changed(site):
    site.put()
    status, body = site.post("models/residency", model="net", floor="device")
    assert (status, body) == (200, {"model": "net", "incarnation": 1, "floor": "device"})
    assert site.moved == [True]
    assert [(event.type, event.old, event.new) for event in site.events.read()[0]] == [("floor", "unpinned", "device")]
    assert reason(site.post("models/residency", model="net", floor="disk")) == (400, "invalid")


def test_the_floor_is_changed_only_where_an_operator_moves_the_weights(site):
    site.put()
    site.residency.mode = "self_managed"
    assert reason(site.post("models/residency", model="net", floor="device")) == (409, "residency")


def test_trim_frees_down_to_a_target(site):
    status, body = site.post("devices/trim", target_bytes=100)
    assert (status, body) == (200, {"device": {"device": 0, "weights_bytes": 5}})
    assert site.post("devices/trim")[0] == 200
    assert site.post("devices/trim", compact=True)[0] == 200
    assert site.residency.calls == [("trim", 100), ("trim", 0), ("compact",)]


def test_there_is_one_device(site):
    assert reason(site.post("devices/trim", device=1)) == (404, "unknown_device")


def test_calls_that_move_weights_are_bounded(site):
    site.residency.gate.clear()
    moving = [threading.Thread(target=lambda: site.post("devices/trim")) for _ in range(8)]
    for each in moving:
        each.start()
    site.until(lambda: len(site.residency.calls) == 8)
    assert reason(site.post("devices/trim")) == (429, "shed")
    site.residency.gate.set()
    for each in moving:
        each.join(WAIT)


def test_idle_times_are_read_and_changed_one_by_one(site):
    zeros = {"parameter_idle_ms": 0.0, "workspace_idle_ms": 0.0, "host_idle_ms": 0.0}
    assert site.get("reclaim") == (200, zeros)
    assert site.call("PATCH", "/v1/reclaim", {"parameter_idle_ms": 1500}) == (
        200,
        {**zeros, "parameter_idle_ms": 1500.0},
    )
    assert site.call("PATCH", "/v1/reclaim", {"host_idle_ms": 7.5})[1]["parameter_idle_ms"] == 1500.0
    assert site.call("PATCH", "/v1/reclaim", {})[0] == 200
    assert reason(site.call("PATCH", "/v1/reclaim", {"parameter_idle_ms": -1})) == (400, "invalid")


# --- program sets -------------------------------------------------------------------------------------------------


def test_a_set_is_staged_and_listed(site):
    site.put()
    directory = site.bundle("other")
    status, body = site.post(
        "models/programs", model="net", base_directory=str(directory), label="b", sources=["model.mlir"]
    )
    assert (status, body["program"]["phase"], body["incarnation"]) == (200, "ready", 1)
    assert site.programs.calls == [("stage", "net", directory, 0, ["model.mlir"], "b", True, 0.0)]
    status, body = site.get("models/programs?model=net")
    assert (status, body["selected"], body["capacity"], [each["id"] for each in body["programs"]]) == (
        200,
        1,
        4,
        [1, 2],
    )
    assert site.get("models/variants?model=net") == (status, body)


def test_staging_need_not_wait(make):
    site = make(admission={"held_requests": 0})
    site.put()
    site.bundle("other")
    status, body = site.post("models/variants", model="net", base_directory="other", wait=False, shadow_percent=5)
    assert (status, body["program"]["phase"]) == (202, "pending")
    assert site.programs.calls[0][-1] == 5.0
    assert reason(site.post("models/programs", model="net", base_directory="other")) == (429, "held_full")


def test_programs_come_from_the_model_directories(site):
    site.put()
    assert reason(site.post("models/programs", model="net", base_directory="/etc")) == (400, "invalid")
    assert site.programs.calls == []


def test_a_set_is_selected_with_compare_and_set(site):
    site.put()
    status, body = site.post("models/programs/select", model="net", program=2, expected=1, require_clean=True)
    assert (status, body) == (200, {"model": "net", "incarnation": 1, "selected": 2, "previous": 1})
    assert site.programs.calls == [("select", "net", 2, 1, True)]
    site.programs.error = ExpectedMismatch("set 2 is selected; expected 1", selected=2)
    status, body = site.post("models/programs/select", model="net", program=1, expected=1)
    assert (status, body["error"]["reason"], body["selected"]) == (409, "expected_mismatch", 2)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UnknownModel("no set 9", reason="unknown_program"), 404, "unknown_program"),
        (WrongState("pending", reason="pending"), 409, "pending"),
        (WrongState("selected", reason="selected"), 409, "selected"),
        (CapacityFull("4 sets", reason="program_capacity"), 429, "program_capacity"),
        (InvalidRequest("argument 0 is f16"), 400, "invalid"),
    ],
)
def test_what_program_sets_refuse_is_told(site, error, status, told):
    site.put()
    site.bundle("other")
    site.programs.error = error
    for path, fields in (
        ("", {"base_directory": "other"}),
        ("/remove", {"program": 2}),
        ("/shadow", {"program": 2, "percent": 1}),
    ):
        assert reason(site.post(f"models/programs{path}", model="net", **fields)) == (status, told)


def test_a_set_is_removed(site):
    site.put()
    site.bundle("other")
    site.post("models/programs", model="net", base_directory="other")
    status, body = site.post("models/programs/remove", model="net", program=2)
    assert (status, [each["id"] for each in body["programs"]]) == (200, [1])


def test_a_shadow_is_set_and_its_counts_are_told(site):
    site.put()
    status, body = site.post("models/programs/shadow", model="net", program=1, percent=12.5, tolerances={"f32": 1e-3})
    assert status == 200
    assert body["program"]["shadow"] == {
        "percent": 12.5,
        "batches": 4,
        "skipped": 1,
        "mismatches": 1,
        "errors": 0,
        "largest_difference": {"y": None, "z": 0.5},
        "first_mismatch": "y differs",
        "first_error": "",
        "against": 1,
    }
    assert site.programs.calls == [("shadow", "net", 1, 12.5, {"f32": 1e-3})]


# --- repository ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "told"), [("static", "static"), ("explicit", "not_dynamic")])
def test_only_a_dynamic_server_looks_through_its_directories(make, mode, told):
    assert reason(make(mode=mode).post("repository/poll")) == (409, told)


def test_a_look_tells_what_it_found(make, tmp_path):
    site = make(mode="dynamic")
    site.watcher.changes = [Change("rename", "new", tmp_path / "new", "old"), Change("load", "x", tmp_path / "x")]
    status, body = site.call("POST", "/v1/repository/poll")
    assert status == 200
    assert body == {
        "changes": [
            {"name": "new", "action": "rename", "directory": str(tmp_path / "new"), "from": "old"},
            {"name": "x", "action": "load", "directory": str(tmp_path / "x"), "from": ""},
        ]
    }
