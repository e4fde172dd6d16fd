"""Every cell of the table of states and operations, over gRPC (spec worker 11.5.1)."""

import contextlib

import pytest
from admin_support import Site

from rsrv.client import Admin
from rsrv.core.errors import Code, IncarnationChanged, RsrvError
from rsrv.rpc import GrpcioEngine
from rsrv.serve.admin.requests import RegisterRequest, UnregisterRequest
from rsrv.serve.admin.service import AdminService

STATES = ["registered", "preparing", "ready", "failed", "retiring", "release_failed"]
DONE, UNDERWAY = (False, ""), (True, "")
REMOVING = ("removing", "removing")

# Written down from the specification: whether work goes on after the answer, or the reason of a refusal.
CELLS = {
    "register": ["name_taken"] * 6,
    "drain": [DONE, DONE, DONE, DONE, *REMOVING],
    "undrain": [DONE, DONE, DONE, "failed", *REMOVING],
    "activate": [UNDERWAY, UNDERWAY, UNDERWAY, "failed", *REMOVING],
    "deactivate": [UNDERWAY, "operation_pending", UNDERWAY, "failed", *REMOVING],
    "pin": [DONE, DONE, DONE, "failed", *REMOVING],
    "unpin": [DONE, DONE, DONE, "failed", *REMOVING],
    "stage": ["not_ready", "not_ready", None, "failed", *REMOVING],
    "select": ["not_ready", "not_ready", None, "failed", *REMOVING],
    "remove": ["not_ready", "not_ready", None, "failed", *REMOVING],
    "retry": ["not_failed", "not_failed", "not_failed", UNDERWAY, "removing", UNDERWAY],
    "unregister": [UNDERWAY] * 6,
}
AFTER = {
    ("undrain", "registered"): "preparing",
    ("activate", "registered"): "preparing",
    ("retry", "failed"): "preparing",
    ("retry", "release_failed"): "retiring",
    ("unregister", "ready"): "retiring",
}


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path, serve=False)
    yield site
    site.close()


@pytest.fixture
def admin(site):
    with contextlib.ExitStack() as stack:
        service = AdminService(site.do, site.events, held=site.config.held_requests, place=site.admission.place)
        engine = GrpcioEngine(
            service.routes(), host="127.0.0.1", port=0, threads=8, max_recv_bytes=1 << 20, max_send_bytes=1 << 20
        )
        port = engine.bind()
        engine.start()
        stack.callback(service.close)
        stack.callback(engine.stop, 0.0)
        yield stack.enter_context(Admin(f"127.0.0.1:{port}"))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("operation", CELLS)
def test_a_cell_of_the_table(site, admin, operation, state):
    site.put("net", state, "drained")
    directory = str(site.bundle("net"))
    arguments = {
        "register": (directory,),
        "stage": (directory,),
        "select": (1,),
        "remove": (2,),
    }.get(operation, ())
    options = {"expected": 1} if operation == "select" else {}
    expected = CELLS[operation][STATES.index(state)]

    if isinstance(expected, str):
        with pytest.raises(RsrvError) as caught:
            getattr(admin, operation)("net", *arguments, **options)
        code = Code.ALREADY_EXISTS if operation == "register" else Code.FAILED_PRECONDITION
        assert (caught.value.code, caught.value.reason) == (code, expected)
        assert site.entry().state.value == state
        return
    found = getattr(admin, operation)("net", *arguments, **options)
    if expected is not None:
        assert found.underway is expected[0]
        assert found.incarnation > 0
    if (operation, state) in AFTER:
        assert found.registration == AFTER[operation, state]


@pytest.mark.parametrize(
    "operation", ["retry", "drain", "undrain", "unregister", "activate", "deactivate", "pin", "unpin"]
)
def test_a_call_for_another_incarnation_is_refused_and_changes_nothing(site, admin, operation):
    entry = site.put("net", "ready", "drained")
    with pytest.raises(RsrvError) as caught:
        getattr(admin, operation)("net", if_incarnation=entry.incarnation + 1)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "incarnation_changed")
    with pytest.raises(RsrvError) as caught:
        getattr(admin, operation)("nobody")
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "unknown_model")
    assert site.registrations.calls == []


def test_static_servers_register_and_remove_nothing(tmp_path):
    site = Site(tmp_path, mode="static", serve=False)
    service = AdminService(site.do, site.events, held=4, place=site.admission.place)
    engine = GrpcioEngine(
        service.routes(), host="127.0.0.1", port=0, threads=8, max_recv_bytes=1 << 20, max_send_bytes=1 << 20
    )
    url = f"127.0.0.1:{engine.bind()}"
    engine.start()
    try:
        site.put("net")
        with Admin(url) as admin:
            for refused in (
                lambda: admin.register("other", str(site.bundle("other"))),
                lambda: admin.unregister("net"),
                admin.poll,
            ):
                with pytest.raises(RsrvError) as caught:
                    refused()
                assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "static")
            assert admin.drain("net").admission == "drained"
    finally:
        engine.stop(0.0)
        service.close()
        site.close()


def test_where_models_follow_their_directories_a_removal_leaves_a_tombstone_that_registering_takes_away(tmp_path):
    site = Site(tmp_path, mode="dynamic", serve=False)
    try:
        directory = site.bundle("net")
        site.put("net", "failed")
        site.do.unregister_model(UnregisterRequest(model="net"))
        assert site.watcher.buried == {"net"}
        site.do.register_model(RegisterRequest(model="net", directory=str(directory)))
        assert site.watcher.buried == set()
    finally:
        site.close()


def test_a_removal_that_is_refused_leaves_none(tmp_path):
    site = Site(tmp_path, mode="dynamic", serve=False)
    try:
        site.put("net", "ready")

        def refuse(name, **options):
            raise IncarnationChanged("it is another by now")

        site.registrations.unregister = refuse
        with pytest.raises(IncarnationChanged):
            site.do.unregister_model(UnregisterRequest(model="net"))
        assert site.watcher.buried == set()
    finally:
        site.close()
