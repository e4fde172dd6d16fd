import json

import grpc
import pytest

from rsrv.cli.ctl import whereabouts
from rsrv.cli.main import main


def run(stub, *words):
    return main(["ctl", "--url", stub.url, *words])


def test_residency_shows_where_the_weights_of_all_models_are(stub, capsys):
    assert run(stub, "residency") == 0
    title, header, twice, cold = capsys.readouterr().out.splitlines()
    assert title == "externally_managed · fair · 3.0 GiB for weights that come and go"
    assert header.split() == ["model", "floor", "on", "weights", "share", "waiting", "served"]
    assert twice.split() == ["twice", "system", "device+host", "1.5", "KiB", "2.5", "3", "7"]
    assert cold.split() == ["cold", "-", "file", "64", "B", "1", "0", "0"]


def test_residency_of_one_model_as_json_has_all_that_the_server_told(stub, capsys):
    assert run(stub, "residency", "twice", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["residency_mode"], found["weight_cache_max_bytes"]) == ("externally_managed", 3 << 30)
    (model,) = found["models"]
    assert (model["name"], model["floor"], model["batch_input_name"]) == ("twice", "system", "x")


def test_residency_is_set_and_the_floor_that_was_reached_is_shown(stub, capsys):
    assert run(stub, "residency", "twice", "device") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["twice", "device"]
    assert (stub.requests[0].name, stub.requests[0].target) == ("twice", 3)
    assert run(stub, "residency", "twice", "unpinned", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"model": "twice", "floor": "unpinned"}


def test_the_server_may_be_named_before_or_after_the_command(stub, capsys):
    assert main(["ctl", "compact", "--url", stub.url]) == 0
    assert main(["ctl", "--url", "127.0.0.1:1", "compact", "--url", stub.url]) == 0
    assert stub.calls == ["CompactMemory", "CompactMemory"]


def test_a_share_is_set_and_shown(stub, capsys):
    assert run(stub, "policy", "twice", "--weight", "0.5") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["twice", "0.5"]
    assert (stub.requests[0].name, stub.requests[0].weight) == ("twice", 0.5)
    assert run(stub, "policy", "twice") == 0
    assert " 2.5 " in capsys.readouterr().out.splitlines()[-1]
    assert run(stub, "policy", "twice", "--weight", "0.5", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"model": "twice", "weight": 0.5}


def test_memory_is_compacted_and_models_are_loaded_again(stub, capsys):
    assert run(stub, "compact", "--reload", "twice, cold,") == 0
    assert list(stub.requests[0].reload_models) == ["twice", "cold"]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["2", "1.5", "KiB"]
    assert run(stub, "compact", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"reloaded": 0, "resident_bytes": 1536}


@pytest.mark.parametrize("command", ["residency", "policy"])
def test_a_model_that_is_not_there_is_named(stub, capsys, command):
    assert run(stub, command, "nobody") == 1
    assert "the server has no model 'nobody' that is ready" in capsys.readouterr().err


def test_refusals_of_the_server_end_with_its_words(stub, capsys):
    stub.refuse["SetModelResidency"] = (grpc.StatusCode.FAILED_PRECONDITION, "it moves weights itself", "residency")
    assert run(stub, "residency", "twice", "device") == 1
    assert "it moves weights itself" in capsys.readouterr().err


def test_a_floor_that_does_not_exist_is_wrong_usage(stub, capsys):
    assert run(stub, "residency", "twice", "disk") == 2
    assert "'disk' is not one of" in capsys.readouterr().err
    assert stub.calls == []


@pytest.mark.parametrize("command", [["residency"], ["policy", "twice"], ["compact"]])
@pytest.mark.parametrize("seconds", ["inf", "1e300", "1e12", "86401"])
def test_a_timeout_that_no_call_can_have_is_wrong_usage(stub, capsys, command, seconds):
    assert run(stub, *command, "--timeout", seconds) == 2
    said = capsys.readouterr().err
    assert f"timeout is {float(seconds):g} seconds" in said
    assert "at most 86400 (a day)" in said
    assert stub.calls == []


def test_nobody_there_is_unreachable(capsys):
    assert main(["ctl", "--url", "127.0.0.1:1", "residency"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_weights_are_in_one_memory_or_both_or_only_in_their_file():
    assert [whereabouts(*there) for there in ((True, False), (False, True), (True, True), (False, False))] == [
        "device",
        "host",
        "device+host",
        "file",
    ]
