"""``rsrv ctl`` against a server whose administration answers what the test says."""

import json
import os

import pytest
from support.administration import OPERATION, PROGRAM, AdminServer

from rsrv.cli.main import command, main
from rsrv.core import errors
from rsrv.serve.admin import requests
from rsrv.serve.admin.requests import Accepted, ProgramListAnswer

QUIET = OPERATION.model_copy(
    update={
        "admission": "open",
        "accepted": Accepted(),
        "parameter_operation": "idle",
        "error": "",
        "pinned": False,
    }
)


@pytest.fixture
def server():
    with AdminServer() as running:
        yield running


def run(server, *words):
    return main(["ctl", "--url", server.url, *words])


def last_row(capsys):
    return capsys.readouterr().out.splitlines()[-1].split()


COMMANDS = [  # command line, the requests that arrive
    ("retry net", [requests.Target(model="net")]),
    ("drain net", [requests.DrainRequest(model="net")]),
    ("undrain net --if-incarnation 7", [requests.Target(model="net", if_incarnation=7)]),
    ("unregister net", [requests.UnregisterRequest(model="net")]),
    ("unregister net --abort", [requests.UnregisterRequest(model="net", mode="abort")]),
    ("register net /srv/net", [requests.RegisterRequest(model="net", directory="/srv/net")]),
    (
        "register net /srv/net --drained --residency device --weight 2 --max-batch-size 4 --pinned",
        [
            requests.RegisterRequest(
                model="net",
                directory="/srv/net",
                admission="drained",
                residency="device",
                weight=2.0,
                max_batch_size=4,
                pinned=True,
            )
        ],
    ),
    ("activate net --allow-open", [requests.ActivateRequest(model="net", allow_open=True)]),
    ("deactivate net --host", [requests.DeactivateRequest(model="net", host=True)]),
    ("pin net", [requests.Target(model="net")]),
    ("unpin net", [requests.Target(model="net")]),
    (
        "retry net --wait 2",
        [requests.Target(model="net"), requests.WaitRequest(model="net", until="ready", timeout_ms=2000)],
    ),
    (
        "deactivate net --wait 2",
        [requests.DeactivateRequest(model="net"), requests.WaitRequest(model="net", until="idle", timeout_ms=2000)],
    ),
    ("wait net ready --timeout 1.5", [requests.WaitRequest(model="net", until="ready", timeout_ms=1500)]),
]


@pytest.mark.parametrize(("line", "expected"), COMMANDS)
def test_a_command_asks_for_what_it_says_and_shows_where_the_model_stands(server, capsys, line, expected):
    for name in server.administration.answers:
        if server.administration.answers[name] is OPERATION:
            server.administration.answers[name] = QUIET
    assert run(server, *line.split()) == 0
    assert [request for _, request in server.calls] == expected
    assert last_row(capsys) == ["net", "ready", "open", "0", "-", "-", "7", "-"]


def test_where_a_model_stands_is_a_line_or_an_object(server, capsys):
    assert run(server, "pin", "net") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "state", "gate", "accepted", "weights", "pinned", "incarnation", "error"]
    assert row.split() == ["net", "ready", "draining", "6", "activating", "yes", "7", "it", "was", "full"]
    assert run(server, "pin", "net", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "net",
        "incarnation": 7,
        "registration": "ready",
        "admission": "draining",
        "parameter_operation": "activating",
        "underway": True,
        "pinned": True,
        "error": "it was full",
        "queued": 3,
        "executing": 2,
        "hooks": 1,
        "accepted": 6,
    }


def test_a_relative_directory_starts_where_the_command_runs(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(server, "register", "net", "models/net") == 0
    assert run(server, "programs", "stage", "net", "../b") == 0
    assert server.calls[0][1].directory == os.path.join(os.getcwd(), "models/net")
    assert server.calls[1][1].base_directory == os.path.join(os.path.dirname(os.getcwd()), "b")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("register net /d --wait 1", {"registration": "failed", "error": "no weights"}),
        ("wait net ready", {"registration": "failed", "error": "no weights"}),
        ("unregister net --wait 1", {"registration": "release_failed"}),
        ("drain net --wait 1", {"admission": "draining"}),
        ("activate net --wait 1", {"error": "it never fits"}),
    ],
)
def test_a_wait_that_ends_elsewhere_ends_the_command_with_1(server, capsys, line, answer):
    reached = QUIET.model_copy(update=answer)
    server.administration.answers |= {"wait_model": reached, "drain_model": reached}
    assert run(server, *line.split()) == 1
    assert next(iter(answer.values())) in capsys.readouterr().out


def test_a_model_that_is_gone_is_what_a_removal_waits_for(server, capsys):
    server.administration.answers["wait_model"] = QUIET.model_copy(
        update={"registration": "gone", "admission": "removing", "incarnation": 0}
    )
    assert run(server, "unregister", "net", "--wait", "5") == 0
    assert last_row(capsys) == ["net", "gone", "-", "0", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.WrongState("model 'net' takes requests", reason="not_drained"), "takes requests"),
        (errors.WaitTimeout("not ready after 1 s"), "not ready after 1 s"),
        (errors.IncarnationChanged("it is 8 by now"), "it is 8 by now"),
    ],
)
def test_refusals_of_the_server_end_with_its_words(server, capsys, error, said):
    server.administration.answers |= {"deactivate_model": error}
    assert run(server, "deactivate", "net") == 1
    assert said in capsys.readouterr().err


def test_a_refusal_as_json_has_code_and_reason(server, capsys):
    server.administration.answers["pin_model"] = errors.WrongState("it fails", reason="failed")
    assert run(server, "pin", "net", "--json") == 1
    assert json.loads(capsys.readouterr().err)["error"] == {
        "code": "FAILED_PRECONDITION",
        "reason": "failed",
        "message": "it fails",
        "hint": None,
    }


# --- the list of models -------------------------------------------------------------------------------------------

ROW = {
    "name": "net",
    "state": "ready",
    "admission": "open",
    "accepted": {"queued": 2, "executing": 1, "hooks": 0},
    "residency": {"floor": "system", "state": "resident", "host_copy": True, "pinned": True, "operation_error": ""},
    "programs": {"selected": 2},
    "incarnation": 5,
    "source": "watcher",
    "error": None,
    "pending_error": {"phase": "weights", "type": "WeightsError", "message": "truncated"},
}
BROKEN = {
    "name": "broken",
    "state": "failed",
    "admission": "open",
    "accepted": {"queued": 0, "executing": 0, "hooks": 0},
    "residency": None,
    "programs": None,
    "incarnation": 6,
    "source": "startup",
    "error": {"phase": "manifest", "type": "ManifestError", "message": "no YAML"},
    "pending_error": None,
}


def test_all_models_are_listed_with_what_an_operator_looks_for(server, capsys):
    document = server.administration.answers["get_status"]
    server.administration.answers["get_status"] = document.model_copy(update={"models": [ROW, BROKEN]})
    assert run(server, "models") == 0
    header, net, broken = capsys.readouterr().out.splitlines()
    columns = [
        "model",
        "state",
        "gate",
        "accepted",
        "floor",
        "on",
        "pinned",
        "program",
        "incarnation",
        "source",
        "error",
    ]
    assert header.split() == columns
    assert net.split() == [
        "net",
        "ready",
        "open",
        "3",
        "system",
        "device+host",
        "yes",
        "2",
        "5",
        "watcher",
        "truncated",
    ]
    assert broken.split() == ["broken", "failed", "open", "0", "-", "-", "-", "-", "6", "startup", "no", "YAML"]
    assert run(server, "models", "net", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [ROW, BROKEN]
    assert server.calls[-1] == ("get_status", requests.StatusRequest(model="net"))


# --- program sets -------------------------------------------------------------------------------------------------


def test_program_sets_are_listed_with_what_their_shadows_found(server, capsys):
    assert run(server, "programs", "ls", "net") == 0
    title, header, first, second = capsys.readouterr().out.splitlines()
    assert title == "2 of 4 program sets"
    assert header.split() == ["program", "phase", "selected", "label", "fingerprint", "shadow", "diagnostics"]
    assert first.split() == ["1", "ready", "yes", "-", "-", "-", "-"]
    assert second.split()[:5] == ["2", "ready", "-", "fused", "abcdef012345"]
    assert "12.5 %: 40 batches, 2 mismatches, 1 errors, 3 skipped" in second
    assert second.endswith("all; well")
    assert run(server, "programs", "ls", "net", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["selected"], found["capacity"], len(found["programs"])) == (1, 4, 2)
    assert found["programs"][1]["shadow"]["largest_difference"] == {"y": 0.25, "z": None}


def test_a_set_is_staged_and_a_failed_one_ends_with_1(server, capsys):
    line = "programs stage net /b --base 1 --source a.mlir --source b.mlir --label fused --shadow 5 --no-wait"
    assert run(server, *line.split()) == 0
    assert server.calls[-1][1] == requests.StageRequest(
        model="net",
        base_directory="/b",
        base=1,
        sources=["a.mlir", "b.mlir"],
        label="fused",
        shadow_percent=5.0,
        wait=False,
    )
    failed = PROGRAM.model_copy(update={"phase": "failed", "diagnostics": "it is no MLIR"})
    answer = server.administration.answers["stage_program"].model_copy(update={"program": failed})
    server.administration.answers["stage_program"] = answer
    capsys.readouterr()
    assert run(server, "programs", "stage", "net", "/b") == 1
    assert "it is no MLIR" in capsys.readouterr().out
    assert server.calls[-1][1].wait is True


def test_a_set_is_selected_and_rolled_back_by_comparing(server, capsys):
    assert run(server, "programs", "select", "net", "2", "--expected", "1", "--require-clean") == 0
    assert last_row(capsys) == ["net", "2", "1"]
    expected = requests.SelectRequest(model="net", program=2, expected=1, require_clean=True)
    assert server.calls[-1][1] == expected
    assert run(server, "programs", "select", "net", "2", "--expected", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"model": "net", "selected": 2, "previous": 1}
    assert run(server, "programs", "select", "net", "2") == 2  # without what it is compared with
    assert "--expected" in capsys.readouterr().err


def test_a_set_is_removed_and_the_rest_shown(server, capsys):
    left = ProgramListAnswer(model="net", incarnation=7, selected=1, capacity=4, programs=[])
    server.administration.answers["remove_program"] = left
    assert run(server, "programs", "remove", "net", "2") == 0
    assert capsys.readouterr().out.splitlines()[0] == "0 of 4 program sets"
    assert server.calls[-1][1] == requests.RemoveRequest(model="net", program=2)


def test_a_shadow_is_set_with_tolerances(server, capsys):
    assert (
        run(server, "programs", "shadow", "net", "2", "10", "--tolerance", "f32=1e-4", "--tolerance", "bf16=0.1") == 0
    )
    expected = requests.ShadowRequest(model="net", program=2, percent=10.0, tolerances={"f32": 1e-4, "bf16": 0.1})
    assert server.calls[-1][1] == expected
    assert "40 batches" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["f32", "f32=", "=1", "f32=much"])
def test_a_tolerance_that_is_none_is_wrong_usage(server, capsys, text):
    assert run(server, "programs", "shadow", "net", "2", "10", "--tolerance", text) == 2
    assert "f32=1e-5" in capsys.readouterr().err
    assert server.calls == []


# --- the server ---------------------------------------------------------------------------------------------------


def test_memory_is_trimmed_and_what_is_left_shown(server, capsys):
    assert run(server, "trim", "--target-bytes", "9") == 0
    assert last_row(capsys) == ["0", "1.5", "KiB", "64", "B", "-", "-"]
    assert server.calls[-1][1] == requests.TrimRequest(target_bytes=9)
    assert run(server, "trim", "--compact", "--json") == 0
    assert json.loads(capsys.readouterr().out)["budget"]["resident_bytes"] == 1536
    assert server.calls[-1][1] == requests.TrimRequest(compact=True)


def test_idle_times_are_shown_and_set(server, capsys):
    assert run(server, "reclaim") == 0
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["parameter", "1.5 ms"],
        ["workspace", "never"],
        ["host", "3 ms"],
    ]
    assert run(server, "reclaim", "--parameter-idle-ms", "0", "--host-idle-ms", "50", "--json") == 0
    assert server.calls[-1][1] == requests.ReclaimPolicy(parameter_idle_ms=0, host_idle_ms=50)
    assert json.loads(capsys.readouterr().out)["parameter_idle_ms"] == 1.5


def test_a_look_at_the_directories_tells_what_is_different(server, capsys):
    assert run(server, "poll") == 0
    header, reload, rename = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "action", "from", "directory"]
    assert reload.split() == ["net", "reload", "-", "/srv/net"]
    assert rename.split() == ["new", "rename", "old", "/srv/new"]
    answer = server.administration.answers["poll_repository"]
    server.administration.answers["poll_repository"] = answer.model_copy(update={"changes": []})
    assert run(server, "poll") == 0
    assert "nothing is different" in capsys.readouterr().err


def test_events_are_lines_and_end_after_as_many_as_are_wanted(server, capsys):
    server.events.append("net", 7, "admission", "open", "draining", "by hand")
    server.events.append("", 0, "reclaim", "", "on")
    assert run(server, "events", "--from", "1", "--count", "2") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "1"
    assert first.endswith("net#7 admission open → draining by hand")
    assert second.endswith("- reclaim - → on")
    assert run(server, "events", "net", "--from", "1", "--count", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "seq": 1,
        "time": 1.5e9,
        "model": "net",
        "incarnation": 7,
        "type": "admission",
        "from": "open",
        "to": "draining",
        "detail": "by hand",
    }


def test_events_that_are_lost_are_said_to_be(capsys):
    with AdminServer(capacity=1) as server:
        for _ in range(3):
            server.events.append("net", 7, "admission", "open", "draining")
        assert run(server, "events", "--from", "1", "--count", "2") == 0
    gap, event = capsys.readouterr().out.splitlines()
    assert gap == "3 … events before 3 are not kept any more"
    assert event.startswith("3 ")


def test_events_end_after_so_many_seconds_whatever_happened(server, capsys):
    server.events.append("net", 7, "admission", "open", "draining")
    # There is nothing to come but what the server remembers, and a slow machine needs longer for that.
    for seconds in ("0.3", "3", "30"):
        assert run(server, "events", "--from", "1", "--for", seconds) == 0
        if shown := capsys.readouterr().out.splitlines():
            break
    assert len(shown) == 1


def test_a_server_without_administration_is_told_from_one_that_has_it(server, capsys):
    server.administration.answers["drain_model"] = errors.Unimplemented("unknown method")
    assert run(server, "drain", "net") == 1
    assert "endpoints.admin" in capsys.readouterr().err


def test_ctrl_c_is_the_way_out_of_the_events(server, capsys, monkeypatch):
    def interrupted(self, **options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("rsrv.client.admin.Admin.events", interrupted)
    assert run(server, "events") == 0


# --- which server, with which token -------------------------------------------------------------------------------


def test_the_token_comes_from_a_file_named_on_the_command_line_or_in_the_environment(tmp_path, capsys, monkeypatch):
    file = tmp_path / "token"
    file.write_text("sesame\n")
    with AdminServer(token="sesame") as server:
        assert main(["ctl", "--url", server.url, "models"]) == 1
        assert "token" in capsys.readouterr().err
        assert main(["ctl", "--url", server.url, "--token-file", str(file), "models"]) == 0
        monkeypatch.setenv("RSRV_CTL_TOKEN_FILE", str(file))
        assert main(["ctl", "models", "--url", server.url]) == 0
        assert main(["ctl", "--token-file", str(tmp_path / "none"), "models"]) == 2


@pytest.mark.parametrize("words", [["models"], ["compact"], ["events"]])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two\nlines", "schlüssel".encode()])
def test_a_file_without_a_token_is_a_wrong_command_line(tmp_path, capfd, words, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    assert main(["ctl", "--url", "127.0.0.1:1", "--token-file", str(file), *words, "--json"]) == 2
    assert "token" in json.loads(capfd.readouterr().err)["error"]["message"]


@pytest.mark.parametrize(
    "words", [["reclaim", "--parameter-idle-ms", "nan", "--json"], ["--nope", "--json"], ["wait", "net", "x", "--json"]]
)
def test_a_wrong_command_line_is_told_in_json_wherever_the_option_stands(server, capsys, words):
    assert run(server, *words) == 2
    assert json.loads(capsys.readouterr().err)["error"]["message"]


def test_the_token_also_goes_to_the_control_plane(stub, tmp_path, capsys):
    file = tmp_path / "token"
    file.write_text("sesame")
    assert main(["ctl", "--url", stub.url, "--token-file", str(file), "compact"]) == 0
    assert stub.metadata["authorization"] == "Bearer sesame"


def test_nobody_there_is_unreachable(capsys):
    for words in (["models"], ["drain", "net"], ["programs", "ls", "net"], ["events"]):
        assert main(["ctl", "--url", "127.0.0.1:1", *words]) == 3
        assert "127.0.0.1:1" in capsys.readouterr().err


def walk(node, path="ctl"):
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        yield from walk(child, f"{path} {name}")


NODES = dict(walk(command().commands["ctl"]))


@pytest.mark.parametrize("path", NODES)
def test_every_help_has_an_example_that_parses(path):
    node = NODES[path]
    assert "Example:\n" in node.help
    examples = [line.split() for line in node.help.split("Example:")[1].splitlines() if line.strip()]
    assert all(words[:2] == ["rsrv", "ctl"] for words in examples)
    if not hasattr(node, "commands"):
        assert all(" ".join(words[1:]).startswith(path) for words in examples)
        for words in examples:
            node.make_context(path, words[1 + len(path.split()) :])


def test_the_commands_of_the_contract_are_there():
    ctl = command().commands["ctl"]
    assert set(ctl.commands) >= {
        *["models", "drain", "undrain", "register", "unregister", "activate", "deactivate", "pin", "unpin"],
        *["trim", "reclaim", "retry", "wait", "events", "poll", "programs"],
    }
    assert set(ctl.commands["programs"].commands) == {"ls", "stage", "select", "remove", "shadow"}
