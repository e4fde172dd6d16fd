"""``rsrv ctl gateway`` against the real service behind a real engine."""

import json

import pytest
from support.gateway_control import ControlledGateway

from rsrv.cli.ctl_gateway import knobs_of, replicas_of
from rsrv.cli.main import main
from rsrv.core.errors import UsageError
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.gateway.workers.poll import ModelReport


@pytest.fixture
def served():
    with ControlledGateway() as gateway, gateway.serving() as url:
        gateway.start()
        gateway.tick()
        gateway.url = url
        yield gateway


def run(served, *words):
    return main(["ctl", "--url", served.url, "gateway", *words])


def columns(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def section(out, title, end=None):
    """The rows below a title, without their header."""
    lines = out.splitlines()
    start = lines.index(title) + 2
    stop = lines.index(end) if end else len(lines)
    return [columns(line) for line in lines[start:stop]]


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_shows_rules_repacks_models_and_workers(served, capsys):
    assert run(served, "status") == 0
    shown = capsys.readouterr()
    rules = section(shown.out, "lpt_packing · as configured", "repacks")
    assert ["hysteresis", "0"] in rules
    assert ["forbid_memory_oversubscription", "true"] in rules
    assert len(rules) == 12
    repacks = dict(section(shown.out, "repacks", "models"))
    assert (repacks["count"], repacks["last"].split(", ")[1]) == ("1", "startup")
    assert (repacks["device time since"], repacks["first budget"]) == ("0 of 60 s", "armed")
    assert (repacks["models placed"], repacks["models moved"]) == ("1", "0")
    assert repacks["asked for by operators"] == "0 of 0 done"
    assert section(shown.out, "models", "workers") == [
        ["m", "-", "1", "run", "8", "0.000", "0.000 ms", "a0 0req/0it", "-"]
    ]
    assert section(shown.out, "workers") == [
        ["a0", "yes", "1", "0 s", "100 B", "no limit", "-"],
        ["a1", "yes", "0", "0 s", "0 B", "no limit", "-"],
    ]
    assert shown.err == ""


def test_status_shows_what_is_in_flight_and_what_is_wrong(served, capsys):
    served.models["w1:1"]["other"] = ModelReport(weight_nbytes=2048)
    served.budgets = {"w0:1": 0, "w1:1": 1024}
    for model in served.models.values():
        model["m"] = ModelReport(compute=5.0, requests=10, rows=10, weight_nbytes=100, max_batch=8)
    served.work("m", 5.0)
    assert run(served, "repack") == 0
    with served.router.lock:
        choice = served.packing.select("m", 3, served.URLS, frozenset())
    assert run(served, "set-replicas", "gone", "all", "--fill-mode", "inflight", "--allow-unknown") == 0
    assert run(served, "workers", "drain", "a1") == 0
    capsys.readouterr()
    assert run(served, "status") == 0
    shown = capsys.readouterr()
    assert section(shown.out, "lpt_packing · generation 1", "repacks")
    rows = {row[0]: row for row in section(shown.out, "models", "workers")}
    assert rows["m"][7] == f"{'a0' if choice.urls[0] == 'w0:1' else 'a1'} 1req/3it"
    assert rows["other"][-1] == "[drifted]"
    assert (rows["gone"][1], rows["gone"][2], rows["gone"][-1]) == ("all", "0", "[unplaced]")
    workers = {row[0]: row for row in section(shown.out, "workers")}
    assert workers["a1"][-2:] == ["1.0 KiB", "draining OVERSUBSCRIBED"]
    assert "warning: model gone: fill_mode is inflight" in shown.err


def test_status_of_another_mode_is_its_name(capsys):
    with ControlledGateway(mode=RoundRobin()) as served, served.serving() as url:
        assert main(["ctl", "gateway", "status", "--url", url]) == 0
        assert capsys.readouterr().out.split() == ["mode", "round_robin"]
        assert main(["ctl", "gateway", "status", "--url", url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["mode"], found["policy"], found["models"]) == ("round_robin", None, [])
        assert main(["ctl", "--url", url, "gateway", "repack"]) == 1
        assert "its mode is round_robin" in capsys.readouterr().err


def test_status_as_json_has_all_that_the_gateway_told(served, capsys):
    assert run(served, "status", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"]["rebalance_compute_seconds"] == 300.0
    assert found["repacks"]["last_trigger"] == "startup"
    assert found["models"][0]["replicas"][0]["worker"] == "w0:1"
    assert [worker["name"] for worker in found["workers"]] == ["a0", "a1"]


def test_a_quiet_status_is_the_models(served, capsys):
    assert main(["-q", "ctl", "--url", served.url, "gateway", "status"]) == 0
    assert capsys.readouterr().out == "m\n"


# --- repack ---------------------------------------------------------------------------------------------------------


def test_a_repack_is_waited_for_by_default(served, capsys):
    assert run(served, "repack") == 0
    row = columns(capsys.readouterr().out.splitlines()[-1])
    assert (row[0], row[1], row[3:]) == ("1", "yes", ["1", "0"])


def test_a_repack_that_is_not_waited_for_is_queued(served, capsys):
    served.automatic = False
    assert run(served, "repack", "--wait", "0") == 0
    shown = capsys.readouterr()
    assert columns(shown.out.splitlines()[-1]) == ["1", "not yet", "0.00 s", "-", "-"]
    assert "warning: repack 1 is queued" in shown.err
    assert run(served, "repack", "--wait", "0", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["sequence"] == 2
    assert shown.err == ""


@pytest.mark.parametrize("wait", ["-1", "121", "soon"])
def test_a_wait_out_of_range_is_wrong_usage(capsys, wait):
    assert main(["ctl", "--url", "127.0.0.1:1", "gateway", "repack", "--wait", wait]) == 2
    assert "--wait" in capsys.readouterr().err


# --- set-replicas ---------------------------------------------------------------------------------------------------


def test_replicas_are_set_kept_and_taken_back(served, capsys):
    assert run(served, "set-replicas", "m", "5") == 0
    shown = capsys.readouterr()
    assert columns(shown.out.splitlines()[-1]) == ["m", "5", "2", "run", "8"]
    assert "warning: 5 replicas are wanted and 2 workers are ready" in shown.err
    assert run(served, "set-replicas", "m", "--fill-mode", "spread", "--fill-factor", "0.5") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1]) == ["m", "5", "2", "spread", "4"]
    assert run(served, "set-replicas", "m", "all") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1]) == ["m", "all", "2", "spread", "4"]
    assert run(served, "set-replicas", "m", "-", "--fill-mode", "inherit", "--fill-factor", "0") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1]) == ["m", "-", "1", "run", "8"]
    assert dict(served.packing.knobs.models) == {}
    assert run(served, "set-replicas", "m", "default", "--json") == 0
    assert json.loads(capsys.readouterr().out)["configured_replicas"] == "default"


@pytest.mark.parametrize("replicas", ["0", "1.5", "many", "²"])
def test_replicas_that_are_none_are_wrong_usage(replicas):
    with pytest.raises(UsageError, match="wanted a whole number above 0, all or default"):
        replicas_of(replicas)


@pytest.mark.parametrize(("text", "replicas"), [("3", 3), (" ALL ", "all"), ("Default", "default"), ("-", "default")])
def test_replicas_are_a_number_or_a_word(text, replicas):
    assert replicas_of(text) == replicas


def test_a_call_that_sets_nothing_is_wrong_usage(capsys):
    assert main(["ctl", "--url", "127.0.0.1:1", "gateway", "set-replicas", "m"]) == 2
    assert "nothing is set for 'm'" in capsys.readouterr().err


def test_an_unknown_model_is_refused_unless_it_is_allowed(served, capsys):
    assert run(served, "set-replicas", "new", "2") == 1
    assert "no worker has a model 'new'" in capsys.readouterr().err
    assert run(served, "set-replicas", "new", "2", "--allow-unknown") == 0
    assert "the setting waits for it" in capsys.readouterr().err


# --- set-policy -----------------------------------------------------------------------------------------------------


def test_a_policy_is_set_by_keys_and_values(served, capsys):
    words = ["hysteresis=0.25", "default-replicas=all", "forbid_memory_oversubscription=off", "compaction_interval=3"]
    assert run(served, "set-policy", *words, "routing_policy=fill_rr") == 0
    rules = section(capsys.readouterr().out, "generation 1")
    assert ["hysteresis", "0.25"] in rules
    assert ["default_replicas", "all"] in rules
    assert ["forbid_memory_oversubscription", "false"] in rules
    assert ["compaction_interval", "3"] in rules
    assert ["routing_policy", "fill_rr"] in rules
    assert run(served, "set-policy", "default_replicas=2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["policy"]["default_replicas"], found["policy"]["generation"], found["persisted"]) == (2, 2, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hysteresis"], "'hysteresis' sets nothing; wanted KEY=VALUE"),
        (["hysteresis="], "sets nothing"),
        (["hysteresys=0.1"], "did you mean hysteresis?"),
        (["mode=round_robin"], "all else is read when the gateway starts"),
        (["hysteresis=0.1", "hysteresis=0.2"], "hysteresis is there twice"),
        (["hysteresis=much"], "hysteresis is 'much'; wanted a number"),
        (["compaction_interval=1.5"], "compaction_interval is '1.5'; wanted a whole number"),
        (["forbid_memory_oversubscription=maybe"], "wanted true or false"),
        (["default_replicas=0"], "wanted a whole number above 0, all or default"),
    ],
)
def test_what_sets_no_knob_is_wrong_usage(words, said):
    with pytest.raises(UsageError) as raised:
        dict(knobs_of(words))
    assert said in f"{raised.value.message} {raised.value.hint}"


def test_a_value_out_of_range_is_refused_by_the_gateway(served, capsys):
    assert run(served, "set-policy", "hysteresis=1.5", "compaction_interval=3") == 1
    assert "hysteresis" in capsys.readouterr().err
    assert run(served, "set-policy", "hysteresys=0.5") == 2
    assert "did you mean hysteresis?" in capsys.readouterr().err
    assert served.packing.knobs.generation == 0


def test_a_policy_that_has_a_catch_comes_with_a_warning(served, capsys):
    assert run(served, "set-policy", "routing_fill_mode=inflight") == 0
    assert "warning: routing_fill_mode is inflight" in capsys.readouterr().err


# --- workers --------------------------------------------------------------------------------------------------------


def test_workers_are_listed(served, capsys):
    assert run(served, "workers", "list") == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert columns(header) == [
        *("worker", "address", "state", "models", "in flight", "waiting", "from", "metrics", "incarnation")
    ]
    assert columns(first) == ["a0", "w0:1", "ready", "1", "0", "0", "config", "h0:2", "-"]
    assert columns(second)[:3] == ["a1", "w1:1", "ready"]
    assert run(served, "workers", "list", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["a0", "a1"]


def test_a_worker_is_added_drained_and_removed(served, capsys):
    assert run(served, "workers", "add", "10.0.0.7:8001", "--metrics", "10.0.0.7:8002", "--name", "c0") == 0
    row = columns(capsys.readouterr().out.splitlines()[-1])
    assert row == ["c0", "10.0.0.7:8001", "not ready", "0", "0", "0", "control", "10.0.0.7:8002", "-"]
    assert run(served, "workers", "drain", "c0") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1])[2] == "draining"
    assert run(served, "workers", "undrain", "10.0.0.7:8001") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1])[2] == "not ready"
    assert run(served, "workers", "remove", "c0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["worker"]["name"] == "c0"
    assert run(served, "workers", "remove", "c0") == 1
    assert "no worker 'c0'; it has a0, a1" in capsys.readouterr().err
    assert run(served, "workers", "add", "w9:1", "--name", "a0") == 1
    assert "a0" in capsys.readouterr().err
    assert run(served, "workers", "remove", "a1") == 0
    assert columns(capsys.readouterr().out.splitlines()[-1])[2] == "removed"


def test_a_fleet_without_workers_is_told(served, capsys):
    for name in ("a0", "a1"):
        assert run(served, "workers", "remove", name) == 0
    capsys.readouterr()
    assert run(served, "workers", "list") == 0
    assert "the gateway has no workers" in capsys.readouterr().err


# --- who answers ----------------------------------------------------------------------------------------------------


def test_a_worker_is_no_gateway(stub, capsys):
    for words in (["status"], ["workers", "list"], ["repack"]):
        assert main(["ctl", "--url", stub.url, "gateway", *words]) == 1
        assert f"{stub.url} is no gateway" in capsys.readouterr().err


def test_nobody_there_is_unreachable(capsys):
    assert main(["ctl", "--url", "127.0.0.1:1", "gateway", "status"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_gateway_that_lets_nobody_change_anything_ends_with_its_words(capsys):
    with ControlledGateway(control=None, host="10.0.0.5") as served, served.serving() as url:
        served.url = url
        assert run(served, "workers", "drain", "a0") == 1
        assert "lets nobody change anything: it listens on more than a loopback address" in capsys.readouterr().err
        assert run(served, "status") == 0
