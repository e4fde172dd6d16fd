"""Requests: what is refused is named, with its value and what was wanted; what is left out has its default."""

import pytest

from rsrv.core.errors import InvalidRequest
from rsrv.serve.admin import requests
from rsrv.serve.admin.requests import (
    DrainRequest,
    EmptyRequest,
    ReclaimPolicy,
    RegisterRequest,
    RepositoryChange,
    Request,
    Shadow,
    ShadowRequest,
    StageRequest,
    WaitRequest,
    parse_fields,
    parse_json,
    parse_query,
)

KINDS = [
    kind
    for kind in vars(requests).values()
    if isinstance(kind, type) and issubclass(kind, Request) and kind is not Request
]


def test_what_is_left_out_has_its_default():
    request = parse_json(RegisterRequest, b'{"model": "net", "directory": "/bundles/net"}')
    assert (request.admission, request.residency, request.weight, request.max_batch_size) == ("open", None, None, None)
    assert (request.pinned, request.if_incarnation) == (False, 0)
    stage = parse_fields(StageRequest, {"model": "net", "base_directory": "/x"})
    assert (stage.base, stage.sources, stage.wait, stage.label, stage.shadow_percent) == (0, [], True, "", 0.0)
    assert parse_json(ReclaimPolicy, b"").model_dump(exclude_none=True) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_refuses_what_it_does_not_know_and_cannot_be_changed(kind):
    with pytest.raises(InvalidRequest, match=r"unknown field 'zzz'|is missing"):
        parse_json(kind, b'{"zzz": 1}')
    assert kind.model_config["frozen"]
    assert kind.model_config["strict"]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (RegisterRequest, {"model": "a"}, "field 'directory' is missing; wanted string"),
        (RegisterRequest, {"model": "a", "directory": "/x", "admission": "shut"}, "field 'admission' is 'shut': "),
        (RegisterRequest, {"model": "a", "directory": "/x", "weight": 0}, "wanted number, > 0 or null"),
        (RegisterRequest, {"model": "a", "directory": "/x", "weight": float("nan")}, "field 'weight' is nan"),
        (RegisterRequest, {"model": "a", "directory": "/x", "max_batch_size": 1.0}, "field 'max_batch_size' is 1.0"),
        (DrainRequest, {"model": "a" * 2000}, "field 'model' is 'aaa"),
        (StageRequest, {"model": "a", "base_directory": "/x", "sources": [1]}, "field 'sources.0' is 1"),
        (StageRequest, {"model": "a", "base_directory": "/x", "shadow_percent": 101}, "field 'shadow_percent' is 101"),
        (ShadowRequest, {"model": "a", "program": 0, "percent": 1}, "field 'program' is 0"),
        (
            ShadowRequest,
            {"model": "a", "program": 1, "percent": 1, "tolerances": {"f32": -1}},
            "'tolerances.f32' is -1",
        ),
        (EmptyRequest, {"model": "a"}, "unknown field 'model'"),
    ],
)
def test_a_refusal_names_the_field_its_value_and_what_was_wanted(kind, fields, message):
    with pytest.raises(InvalidRequest) as caught:
        parse_fields(kind, fields)
    assert message in caught.value.message
    assert len(caught.value.message) < 300


def test_a_misspelt_field_has_a_suggestion_and_another_the_list():
    with pytest.raises(InvalidRequest) as caught:
        parse_json(RegisterRequest, b'{"modell": "a", "model": "a", "directory": "/x"}')
    assert caught.value.hint == "did you mean 'model'?"
    with pytest.raises(InvalidRequest) as caught:
        parse_json(DrainRequest, b'{"xyz": 1, "model": "a"}')
    assert caught.value.hint == "the fields are model, if_incarnation, component, wait_ms"
    with pytest.raises(InvalidRequest) as caught:
        parse_json(EmptyRequest, b'{"xyz": 1}')
    assert caught.value.hint == "this call takes no fields"


def test_a_query_has_text_for_numbers():
    request = parse_query(WaitRequest, {"model": "net", "until": "ready", "timeout_ms": "50"})
    assert request.timeout_ms == 50
    with pytest.raises(InvalidRequest, match="field 'timeout_ms' is 'soon'"):
        parse_query(WaitRequest, {"model": "net", "until": "ready", "timeout_ms": "soon"})


def test_answers_are_json_with_the_names_of_the_table():
    change = RepositoryChange.model_validate({"name": "b", "action": "rename", "directory": "/b", "from": "a"})
    assert change.model_dump_json() == '{"name":"b","action":"rename","directory":"/b","from":"a"}'
    assert (
        '"largest_difference":{"y":null}'
        in Shadow(percent=1.0, largest_difference={"y": float("inf")}).model_dump_json()
    )
