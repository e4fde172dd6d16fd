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


def test_a_server_may_say_where_rows_are_and_which_numbers_of_them_it_has_programs_for(asked, server):
    meta = asked.model_metadata("twice")
    assert ([t.batch_axis for t in (*meta.inputs, *meta.outputs)], meta.batch_sizes) == ([None, None, None], ())
    server.batch_sizes, server.batch_axes = [1, 4, 16], {"x": 0, "y": 0}
    meta = asked.model_metadata("twice")
    assert [t.batch_axis for t in (*meta.inputs, *meta.outputs)] == [0, 0, None]
    assert meta.batch_sizes == (1, 4, 16)


def test_batch_sizes_and_axes_that_cannot_be_are_left_out(asked, server):
    server.batch_sizes, server.batch_axes = [8, 0, 2, -1, 8], {"x": 2, "y": -1, "total": 0}
    meta = asked.model_metadata("twice")
    assert [t.batch_axis for t in (*meta.inputs, *meta.outputs)] == [None, None, 0]
    assert meta.batch_sizes == (2, 8)


def test_the_counts_of_a_model(asked):
    assert asked.model_counts("twice") == ModelCounts(rows=12, executions=5)


def test_nobody_there_is_unreachable():
    with StubServer() as server:
        url = server.url
    with Server(url) as handle, pytest.raises(ServerUnreachable):
        handle.live()
