import pytest
from support.client_stub import StubServer

from rsrv.client import ModelCounts, ModelEntry, Server, ServerMetadata, TensorMeta
from rsrv.core.errors import ServerUnreachable, UnknownModel


@pytest.fixture
def asked(server):
    with Server(server.url) as handle:
        yield handle


def test_a_server_tells_its_health_and_what_it_is(asked):
    assert asked.live() is True
    assert asked.ready() is False
    assert asked.metadata() == ServerMetadata("stub", "1.2", ("system_shared_memory",))


def test_the_list_of_models_has_state_and_reason(asked):
    broken = ModelEntry("broken", "", "UNAVAILABLE", "weights.safetensors is missing")
    assert asked.models() == [ModelEntry("twice", "", "READY", ""), broken]
    assert asked.models(ready=True) == [ModelEntry("twice", "", "READY", "")]
    assert asked.model_ready("twice") is True
    assert asked.model_ready("broken") is False


def test_the_tensors_of_a_model(asked):
    meta = asked.model_metadata("twice")
    assert (meta.name, meta.platform) == ("twice", "stub")
    assert meta.inputs == (TensorMeta("x", "FP32", (-1, 4)),)
    assert meta.outputs == (TensorMeta("y", "FP32", (-1, 4)), TensorMeta("total", "FP32", (3,)))
    with pytest.raises(UnknownModel, match="nobody"):
        asked.model_metadata("nobody")


def test_the_counts_of_a_model(asked):
    assert asked.model_counts("twice") == ModelCounts(rows=12, executions=5)


def test_nobody_there_is_unreachable():
    with StubServer() as server:
        url = server.url
    with Server(url) as handle, pytest.raises(ServerUnreachable):
        handle.live()
