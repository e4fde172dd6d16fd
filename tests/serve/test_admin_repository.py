"""RepositoryModelLoad and Unload against scripted registrations: which of their operations each case comes to."""

from concurrent.futures import Future

import grpc
import pytest
from admin_support import Site
from support.deadlines import overdue

from rsrv.core.errors import Code, ManifestError
from rsrv.protos import inference as pb
from rsrv.rpc import GrpcioEngine
from rsrv.rpc.access import BearerToken
from rsrv.serve.admin.repository import MAX_OPEN, RepositoryService
from rsrv.serve.registry import Failure, ModelState

PREFIX = "/inference.GRPCInferenceService/"
WAIT = 30


class Repository:
    """A site whose preparations end as `outcome` says: at once (None), with an error, or when the test says."""

    def __init__(self, root, *, mode="explicit", token=None):
        self.site = Site(root, mode=mode, serve=False)
        self.outcome = None
        self.futures = []
        registrations = self.site.registrations
        registrations.reload = self._reload
        registrations.prepare = self._prepare
        self.service = RepositoryService(
            self.site.do,
            registrations,
            self.site.registry,
            model_dirs=self.site.config.model_dirs,
            static=mode == "static",
            token=token,
        )
        self.engine = GrpcioEngine(
            self.service.routes(),
            host="127.0.0.1",
            port=0,
            threads=2 * MAX_OPEN,
            max_recv_bytes=1 << 20,
            max_send_bytes=1 << 20,
        )
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.engine.bind()}", [("grpc.use_local_subchannel_pool", 1)])
        self.engine.start()

    def _settle(self, name):
        future = Future()
        self.futures.append(future)
        if self.outcome is None:
            future.set_result(self.site.registry.change(name, state=ModelState.READY))
        elif self.outcome != "later":
            future.set_exception(self.outcome)
        return future

    def _reload(self, name, directory=None):
        self.site.registrations.calls.append(("reload", name, directory))
        return self._settle(name)

    def _prepare(self, name, *, if_incarnation=0):
        self.site.registrations.calls.append(("prepare", name))
        return self._settle(name)

    @property
    def asked(self):
        return [call[0] for call in self.site.registrations.calls]

    def close(self):
        self.channel.close()
        self.engine.stop(0.0)
        self.service.close()
        self.site.close()

    def call(self, method, name, *, metadata=(), timeout=WAIT, **parameters):
        request = getattr(pb, f"Repository{method}Request")(model_name=name)
        for key, value in parameters.items():
            setattr(request.parameters[key], "bool_param" if isinstance(value, bool) else "string_param", value)
        stub = self.channel.unary_unary(f"{PREFIX}Repository{method}", None, None)
        return stub.future(request.SerializeToString(), timeout=timeout, metadata=metadata)

    def load(self, name, **options):
        return self.call("ModelLoad", name, **options).result(WAIT)

    def unload(self, name, **options):
        return self.call("ModelUnload", name, **options).result(WAIT)

    def refused(self, method, name, **options):
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, name, **options).result(WAIT)
        error = caught.value
        return Code(error.code().value[0]), dict(error.trailing_metadata())["rsrv-reason"], error.details()


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path)
    yield made
    made.close()


def test_a_name_that_nobody_registered_is_registered_from_its_directory_and_waited_for(repository):
    directory = repository.site.bundle("net")
    assert repository.load("net") == b""
    registered, prepared = repository.site.registrations.calls
    assert registered[:5] == ("register", "net", directory, "api", "open")
    assert prepared == ("prepare", "net")


def test_the_first_of_the_directories_that_has_the_name_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    made = Repository(tmp_path / "b")
    try:
        made.service._model_dirs = [str(tmp_path / "a"), str(tmp_path / "b")]
        (tmp_path / "a" / "net").mkdir()  # without a manifest: no bundle
        directory = made.site.bundle("net")
        made.load("net")
        assert made.site.registrations.calls[0][2] == directory
    finally:
        made.close()


def test_a_model_that_is_loaded_is_reloaded_and_one_that_failed_is_prepared_again(repository):
    repository.site.put("net", "ready")
    repository.load("net")
    assert repository.asked == ["reload"]
    repository.site.put("broken", "failed")
    repository.load("broken")
    assert repository.asked == ["reload", "reload"]


def test_a_model_that_is_being_prepared_is_waited_for(repository):
    repository.site.put("net", "preparing")
    repository.load("net")
    assert repository.asked == ["prepare"]


def test_a_model_that_was_only_registered_is_prepared_and_its_gate_opened(repository):
    repository.site.put("net", "registered", "drained")
    repository.load("net")
    assert repository.asked == ["prepare", "undrain"]
    assert repository.site.entry().gate == "open"


def test_what_the_preparation_failed_with_is_what_the_call_fails_with(repository):
    repository.site.put("net", "ready")
    repository.outcome = ManifestError("it is no YAML")
    found = repository.refused("ModelLoad", "net")
    assert found == (Code.FAILED_PRECONDITION, "manifest", "it is no YAML")


def test_a_preparation_that_failed_before_anybody_waited_says_why_all_the_same(repository):
    repository.site.bundle("net")

    def prepare(name, *, if_incarnation=0):
        from rsrv.core.errors import WrongState

        failure = Failure("compile", "ProgramError", "bad op")
        repository.site.registry.change(name, state=ModelState.FAILED, failure=failure)
        raise WrongState("it failed", reason="failed")

    repository.site.registrations.prepare = prepare
    code, reason, text = repository.refused("ModelLoad", "net")
    assert (code, reason) == (Code.UNAVAILABLE, "failed")
    assert "bad op" in text


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_a_name_that_no_bundle_can_have_is_refused(repository, name):
    assert repository.refused("ModelLoad", name)[0] is Code.INVALID_ARGUMENT
    assert repository.asked == []


def test_a_name_without_a_directory_is_not_found_and_says_where_was_looked(repository):
    code, reason, text = repository.refused("ModelLoad", "nobody")
    assert (code, reason) == (Code.NOT_FOUND, "unknown_model")
    assert str(repository.site.root) in text
    assert repository.refused("ModelUnload", "nobody")[:2] == (Code.NOT_FOUND, "unknown_model")


def test_parameters_that_would_change_the_bundle_are_refused(repository):
    repository.site.bundle("net")
    for parameters in ({"config": "{}"}, {"file:1/model.mlir": "x"}):
        code, _, text = repository.refused("ModelLoad", "net", **parameters)
        assert code is Code.INVALID_ARGUMENT
        assert next(iter(parameters)) in text
    assert repository.refused("ModelUnload", "net", force=True)[0] is Code.INVALID_ARGUMENT
    assert repository.asked == []


def test_a_removal_is_waited_for(repository):
    repository.site.put("net", "ready")
    call = repository.call("ModelUnload", "net", unload_dependents=True)
    repository.site.until(lambda: repository.asked == ["unregister"])
    assert repository.site.registrations.calls == [("unregister", "net", "drain")]
    assert not call.done()
    repository.site.registry.remove("net")
    repository.site.registrations.note("net")
    assert call.result(WAIT) == b""


def test_a_name_that_somebody_else_registers_meanwhile_is_waited_for(repository, monkeypatch):
    repository.site.bundle("net")
    register = repository.site.do.register_model

    def second(request):
        register(request)
        return register(request)

    monkeypatch.setattr(repository.site.do, "register_model", second)
    assert repository.load("net") == b""
    assert repository.asked == ["register", "register", "prepare"]


@pytest.mark.parametrize("name", ["é" * 200, "x" * 1024])
def test_a_name_that_no_file_can_have_is_not_found(repository, name):
    assert repository.refused("ModelLoad", name)[:2] == (Code.NOT_FOUND, "unknown_model")


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_a_name_that_no_model_can_have_is_refused(repository, name):
    for method in ("ModelLoad", "ModelUnload"):
        code, reason, _ = repository.refused(method, name)
        assert (code, reason) in ((Code.INVALID_ARGUMENT, "invalid"), (Code.NOT_FOUND, "unknown_model"))
    assert repository.refused("ModelUnload", name)[0] is Code.INVALID_ARGUMENT
    assert repository.asked == []


def test_a_removal_that_fails_is_no_success(repository):
    repository.site.put("net", "ready")
    call = repository.call("ModelUnload", "net")
    repository.site.until(lambda: repository.asked == ["unregister"])
    failure = Failure.of("release", OSError("busy"))
    repository.site.registry.change("net", state=ModelState.RELEASE_FAILED, failure=failure)
    repository.site.registrations.note("net")
    error = call.exception(WAIT)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "busy" in error.details()


def test_a_removal_has_ended_when_somebody_has_loaded_the_name_again(repository):
    old = repository.site.put("net", "ready").incarnation
    call = repository.call("ModelUnload", "net")
    repository.site.until(lambda: repository.asked == ["unregister"])
    repository.site.registry.remove("net")
    assert repository.site.put("net", "ready").incarnation != old
    repository.site.registrations.note("net")
    assert call.result(WAIT) == b""


@pytest.mark.parametrize("method", ["ModelLoad", "ModelUnload"])
def test_callers_who_leave_leave_their_places_to_others(repository, method):
    repository.outcome = "later"
    for number in range(MAX_OPEN):
        repository.site.put(f"net{number}", "ready")
    calls = [repository.call(method, f"net{number}") for number in range(MAX_OPEN)]
    repository.site.until(lambda: len(repository.asked) == MAX_OPEN)
    for call in calls:
        call.cancel()
    repository.site.until(lambda: repository.service._open == 0)
    assert not any(future.cancelled() for future in repository.futures)


def test_a_static_server_loads_and_unloads_nothing(tmp_path):
    made = Repository(tmp_path, mode="static")
    try:
        made.site.put("net", "ready")
        for method in ("ModelLoad", "ModelUnload"):
            assert made.refused(method, "net")[:2] == (Code.FAILED_PRECONDITION, "static")
        assert made.asked == []
    finally:
        made.close()


def test_with_a_token_only_calls_that_carry_it_are_answered(tmp_path):
    made = Repository(tmp_path, token=BearerToken("sesame"))
    try:
        made.site.put("net", "ready")
        assert made.refused("ModelLoad", "net")[0] is Code.UNAUTHENTICATED
        made.load("net", metadata=[("authorization", "Bearer sesame")])
        assert made.asked == ["reload"]
    finally:
        made.close()


def test_more_loads_than_there_are_threads_for_are_shed(repository):
    repository.outcome = "later"
    for number in range(MAX_OPEN + 1):
        repository.site.put(f"net{number}", "ready")
    calls = [repository.call("ModelLoad", f"net{number}") for number in range(MAX_OPEN)]
    repository.site.until(lambda: len(repository.futures) == MAX_OPEN)
    code, reason, _ = repository.refused("ModelLoad", f"net{MAX_OPEN}")
    assert (code, reason) == (Code.RESOURCE_EXHAUSTED, "shed")
    for future in repository.futures:
        future.set_result(None)
    assert [call.result(WAIT) for call in calls] == [b""] * MAX_OPEN
    repository.outcome = None
    assert repository.load(f"net{MAX_OPEN}") == b""


def test_a_caller_whose_deadline_passes_is_answered_and_the_load_goes_on(repository):
    repository.site.put("net", "ready")
    repository.outcome = "later"
    error = overdue(
        lambda seconds: repository.call("ModelLoad", "net", timeout=seconds).exception(WAIT),
        lambda: repository.futures,
    )
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    repository.site.until(lambda: repository.service._open == 0)
    assert not any(future.cancelled() for future in repository.futures)
