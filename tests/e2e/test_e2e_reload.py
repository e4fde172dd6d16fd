"""Models that are replaced while clients use them, and directories that hold nonsense for a while: real processes.

Every answer tells which version of the program, the weights and the hooks made it (`benchmarks.versions`).
"""

import json
import os
import shutil
import time
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from support.server import ServerProcess

from benchmarks.replay import memory
from benchmarks.versions import Answers, Version, edit, traffic
from rsrv.bundle.files import HOOKS, MANIFEST, WEIGHTS
from rsrv.client import KServeModel
from rsrv.protos import inference as pb

SETTLE_SECONDS = 0.2
SECONDS = 60
"""How long anything may take at most."""
MIB = 1 << 20
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
FIRST = Version()


def settings(tmp_path):
    return {
        "RSRV_WORKER_MODEL_SETTLE_SECONDS": str(SETTLE_SECONDS),
        "RSRV_WORKER_MODEL_POLL_SECONDS": "0.2",
        "RSRV_WORKER_CACHE_DIR": str(tmp_path / "cache"),
    }


def status(server):
    return json.loads(server.http("/v1/status")[1])


def row(server, name):
    """The model's row in the status, None when there is none."""
    return next((model for model in status(server)["models"] if model["name"] == name), None)


def until(server, condition, what):
    """Wait until `condition` is true, and return it."""
    end = time.monotonic() + SECONDS
    while not (value := condition()):
        assert server.process.poll() is None, server.log
        assert time.monotonic() < end, f"not {what} within {SECONDS} s; {status(server)['models']}\n{server.log}"
        time.sleep(0.02)
    return value


def until_state(server, name, state):
    return until(server, lambda: (found := row(server, name)) and found["state"] == state and found, f"{name} {state}")


def until_gone(server, name):
    until(server, lambda: row(server, name) is None, f"{name} gone")


def until_pending(server, name):
    """Wait for a reload that failed, and return its error."""
    return until(server, lambda: row(server, name)["pending_error"], f"a failed reload of {name}")


def stamp(server, name):
    """What one request is answered with, without its input."""
    with KServeModel(server.url, name, shared_memory="off") as model:
        x = np.array([[1, 2, 3, 4]], np.int64)
        (answer,) = np.unique(model.infer({"x": x})["y"] - x)
        return int(answer)


# --- reloads under load ---------------------------------------------------------------------------------------------


def test_twenty_reloads_under_load_lose_no_request_and_mix_no_versions(tmp_path):
    """Weights, program, hooks and name in turns."""
    nbytes, version, other = 8 * MIB, Version(), Version(7, 7, 7)
    repo = tmp_path / "repo"
    version.write(repo / "a", nbytes=nbytes)
    other.write(repo / "b")
    with ServerProcess(repo, env=settings(tmp_path)) as server:
        server.wait_ready()
        a, b = Answers(["a", "renamed"]), Answers(["b"])
        a.allow(version)
        b.allow(other)

        def compiled():
            return status(server)["server"]["programs"]["compiled"]

        def settled(name):
            """Resident memory of the server when it has freed the version before."""
            weights = row(server, name)["weights_bytes"] + row(server, "b")["weights_bytes"]
            until(server, lambda: status(server)["devices"][0]["weights_bytes"] == weights, "rid of old weights")
            return memory(server.pid)

        with traffic(server.url, [a, b], pause=0.005):
            name, sizes = "a", []
            for number in range(20):
                change, programs = ("weights", "program", "hooks", "name")[number % 4], compiled()
                if change == "name":
                    old, name = name, "renamed" if name == "a" else "a"
                    incarnation = row(server, old)["incarnation"]
                    (repo / old).rename(repo / name)
                    a.first_as(name, SECONDS)
                    assert row(server, old) is None
                    assert row(server, name)["incarnation"] == incarnation
                else:
                    version = version.next(change)
                    allowed = a.allow(version)
                    edit(repo / name, version, nbytes=nbytes)
                    a.first(allowed, SECONDS)
                assert (compiled() > programs) == (change == "program"), change
                sizes.append(settled(name))
            b.more(SECONDS)
        assert a.problems == []
        assert b.problems == []
        assert {answer.version for answer in a.answers} == set(range(16))
        assert {answer.name for answer in a.answers} == {"a", "renamed"}
        # After two reloads of each kind the allocator has what it needs. Three more load weights.
        assert max(sizes[8:]) - max(sizes[:8]) < 2 * nbytes, [size / MIB for size in sizes]
        assert row(server, name)["pending_error"] is None
        assert server.stop() == 0


def test_promotions_by_moving_directories_lose_no_request(tmp_path):
    """``mv prod old; mv staging prod``: somebody has the name ``prod`` all the time, and nothing is loaded."""
    repo, version = tmp_path / "repo", Version()
    version.write(repo / "prod")
    with ServerProcess(repo, env=settings(tmp_path)) as server:
        server.wait_ready()
        prod = Answers(["prod"])
        prod.allow(version)
        with traffic(server.url, [prod], clients=3):
            for number in range(5):
                version = version.next("weights").next("hooks")
                version.write(tmp_path / str(number) / "staging").rename(repo / "staging")
                incarnation = until_state(server, "staging", "ready")["incarnation"]
                allowed = prod.allow(version)
                with server.paused():  # a name that is away for longer than changes settle is gone
                    (repo / "prod").rename(repo / f"old{number}")
                    (repo / "staging").rename(repo / "prod")
                prod.first(allowed, SECONDS)
                assert row(server, "prod")["incarnation"] == incarnation
            prod.more(SECONDS)
        assert prod.problems == []
        assert server.stop() == 0


# --- directories that hold nonsense for a while ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with one model, ``steady``, that clients use all the time, whatever the tests do beside it."""
    tmp = tmp_path_factory.mktemp("served")
    repo = tmp / "repo"
    FIRST.write(repo / "steady")
    with ServerProcess(repo, env=settings(tmp)) as server:
        server.wait_ready()
        steady = Answers(["steady"])
        steady.allow(FIRST)
        with traffic(server.url, [steady], clients=1, pause=0.005):
            yield server, repo, steady


@pytest.fixture
def server(served):
    server, _, steady = served
    yield server
    steady.more(SECONDS)
    assert steady.problems == []
    assert row(server, "steady")["state"] == "ready"


@pytest.fixture
def repo(served, server):
    """The directory of the models, which has nothing but ``steady`` again afterwards."""
    _, repo, _ = served
    yield repo
    for path in repo.iterdir():
        if path.name != "steady":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    until(server, lambda: [model["name"] for model in status(server)["models"]] == ["steady"], "empty")


@contextmanager
def used(server, name, *versions):
    """Clients use a model while the block runs; nothing but these versions, and what is allowed later, may answer."""
    answers = Answers([name])
    for version in versions:
        answers.allow(version)
    with traffic(server.url, [answers], clients=1):
        answers.more(SECONDS)
        yield answers
        answers.more(SECONDS)
    assert answers.problems == []


def copy(made, target, *, last=MANIFEST):
    """The files in an order in which `last` comes last."""
    target.mkdir(exist_ok=True)
    for file in sorted(made.iterdir(), key=lambda file: file.name == last):
        yield shutil.copy(file, target / file.name)


def test_a_new_bundle_whose_writer_stalls_is_served_when_it_is_complete(server, repo, tmp_path):
    made = FIRST.write(tmp_path / "slow")
    # The weights last, so that what is there looks like a bundle before it is one.
    for file in copy(made, repo / "slow", last=WEIGHTS):
        time.sleep(3 * SETTLE_SECONDS)
        if (repo / "slow" / MANIFEST).exists() and file.name != WEIGHTS:
            server.wait_for_log("watcher: change failed name=slow")
    until_state(server, "slow", "ready")
    assert stamp(server, "slow") == FIRST.stamp


def test_a_new_bundle_whose_manifest_comes_last_is_not_looked_at_before(server, repo, tmp_path):
    made = FIRST.write(tmp_path / "late")
    for file in copy(made, repo / "late"):
        if file.name != MANIFEST:
            time.sleep(3 * SETTLE_SECONDS)
            assert row(server, "late") is None
    until_state(server, "late", "ready")
    assert "watcher: change failed name=late" not in server.log


def test_a_reload_whose_writer_stalls_leaves_the_old_version_until_it_is_complete(server, repo, tmp_path):
    FIRST.write(repo / "model")
    until_state(server, "model", "ready")
    second = FIRST.next("program")
    made = second.write(tmp_path / "model")
    with used(server, "model", FIRST) as answers:
        programs = sorted(made.glob("model.b*.mlir"))
        for program in programs:
            shutil.copy(program, repo / "model" / program.name)
            until_pending(server, "model")
            time.sleep(3 * SETTLE_SECONDS)
        assert "model.b" in until_pending(server, "model")["message"]
        answers.more(SECONDS)
        allowed = answers.allow(second)
        shutil.copy(made / MANIFEST, repo / "model" / MANIFEST)
        answers.first(allowed, SECONDS)
        until(server, lambda: row(server, "model")["pending_error"] is None, "without the error")


@pytest.mark.parametrize("in_place", [True, False])
def test_truncated_weights_under_a_valid_header_fail_and_the_version_before_answers(server, repo, tmp_path, in_place):
    FIRST.write(repo / "model", nbytes=MIB)
    until_state(server, "model", "ready")
    weights = repo / "model" / WEIGHTS
    whole = weights.read_bytes()
    with used(server, "model", FIRST) as answers:
        if in_place:
            with weights.open("r+b") as file:
                file.truncate(MIB // 2)
        else:
            (tmp_path / WEIGHTS).write_bytes(whole[: MIB // 2])
            (tmp_path / WEIGHTS).replace(weights)
        assert WEIGHTS in until_pending(server, "model")["message"]
        answers.more(SECONDS)
        weights.write_bytes(whole)
        until(server, lambda: row(server, "model")["pending_error"] is None, "without the error")


def test_a_new_bundle_with_truncated_weights_fails_alone_and_is_served_once_they_are_whole(server, repo, tmp_path):
    made = FIRST.write(tmp_path / "cut", nbytes=MIB)
    whole = (made / WEIGHTS).read_bytes()
    (made / WEIGHTS).write_bytes(whole[: MIB // 2])
    shutil.move(made, repo / "cut")
    error = until_state(server, "cut", "failed")["error"]
    assert error["phase"] == "weights"
    assert WEIGHTS in error["message"]
    (repo / "cut" / WEIGHTS).write_bytes(whole)
    until_state(server, "cut", "ready")
    assert stamp(server, "cut") == FIRST.stamp


def test_a_broken_manifest_leaves_the_version_before_until_it_is_fixed(server, repo):
    FIRST.write(repo / "model")
    until_state(server, "model", "ready")
    manifest = repo / "model" / MANIFEST
    text = manifest.read_text()
    with used(server, "model", FIRST) as answers:
        incarnation = row(server, "model")["incarnation"]
        for broken in ("format_version: [", "", text.replace("i64", "i65")):
            manifest.write_text(broken)
            before = until_pending(server, "model")
            assert before["phase"] == "manifest"
            answers.more(SECONDS)
            assert row(server, "model")["incarnation"] == incarnation
        second = FIRST.next("hooks")
        allowed = answers.allow(second)
        manifest.write_text(text)
        edit(repo / "model", second)
        answers.first(allowed, SECONDS)
        until(server, lambda: row(server, "model")["pending_error"] is None, "without the error")


def test_a_manifest_that_vanishes_for_a_moment_removes_nothing(server, repo, tmp_path):
    FIRST.write(repo / "model")
    until_state(server, "model", "ready")
    manifest = repo / "model" / MANIFEST
    with used(server, "model", FIRST):
        manifest.rename(tmp_path / MANIFEST)
        (tmp_path / MANIFEST).rename(manifest)


def test_a_directory_that_is_replaced_by_a_file_is_unloaded_and_comes_back(server, repo, tmp_path):
    FIRST.write(repo / "model")
    until_state(server, "model", "ready")
    shutil.move(repo / "model", tmp_path / "aside")
    (repo / "model").write_text("no directory")
    until_gone(server, "model")
    (repo / "model").unlink()
    shutil.move(tmp_path / "aside", repo / "model")
    until_state(server, "model", "ready")
    assert stamp(server, "model") == FIRST.stamp


def until_compiling(server, name, times=1):
    until(server, lambda: server.log.count(f"compiling model name={name} ") >= times, f"{name} compiling")


MANY = tuple(range(1, 9))
"""Batch sizes of a model that takes a while to compile."""


def test_a_bundle_that_vanishes_while_it_compiles_leaves_nothing(server, repo):
    Version(program=50).write(repo / "brief", batch_sizes=MANY)
    until_compiling(server, "brief")
    shutil.rmtree(repo / "brief")
    until_gone(server, "brief")
    FIRST.write(repo / "brief")
    until_state(server, "brief", "ready")
    assert stamp(server, "brief") == FIRST.stamp


def test_a_bundle_that_vanishes_while_its_next_version_compiles_is_removed(server, repo, tmp_path):
    FIRST.write(repo / "leaving")
    until_state(server, "leaving", "ready")
    compilations = server.log.count("compiling model name=leaving ")
    for _ in copy(Version(program=51).write(tmp_path / "leaving", batch_sizes=MANY), repo / "leaving"):
        pass
    until_compiling(server, "leaving", compilations + 1)
    shutil.rmtree(repo / "leaving")
    until_gone(server, "leaving")
    weights = row(server, "steady")["weights_bytes"]
    until(server, lambda: status(server)["devices"][0]["weights_bytes"] == weights, "rid of its weights")


def test_a_root_that_is_away_for_a_while_takes_no_model_with_it(server, repo):
    FIRST.write(repo / "model")
    before = until_state(server, "model", "ready")
    with used(server, "model", FIRST) as answers:
        away = repo.with_name("away")
        repo.rename(away)
        until(server, lambda: "model directory is away" in server.log, "aware that the root is away")
        time.sleep(3 * SETTLE_SECONDS)
        answers.more(SECONDS)
        away.rename(repo)
        until(server, lambda: "model directory is back" in server.log, "aware that the root is back")
        assert row(server, "model")["incarnation"] == before["incarnation"]
        second = FIRST.next("weights")
        allowed = answers.allow(second)
        edit(repo / "model", second)
        answers.first(allowed, SECONDS)


def test_a_hundred_bundles_that_are_dropped_in_at_once_are_all_served_and_all_go_again(server, repo, tmp_path):
    versions = [Version(weights=1 + number, program=1 + number % 2, hooks=0) for number in range(100)]
    for number, version in enumerate(versions):
        version.write(tmp_path / f"model{number:03}")
    for path in tmp_path.glob("model*"):
        path.rename(repo / path.name)
    until(server, lambda: sum(model["state"] == "ready" for model in status(server)["models"]) == 101, "all ready")
    stamps = [stamp(server, f"model{number:03}") for number in range(100)]
    assert stamps == [version.stamp for version in versions]
    for path in repo.glob("model*"):
        shutil.rmtree(path)
    until(server, lambda: len(status(server)["models"]) == 1, "rid of all")


def test_a_broken_model_that_is_loaded_twice_is_reported_to_both_calls(server, repo, tmp_path):
    made = FIRST.write(tmp_path / "broken")
    (made / HOOKS).write_text("def preprocess(inputs):\n    return inputs\nraise ValueError('no such table')\n")
    shutil.move(made, repo / "broken")
    until_state(server, "broken", "failed")
    with grpc.insecure_channel(server.url) as channel:
        load = channel.unary_unary(LOAD)
        message = pb.RepositoryModelLoadRequest(model_name="broken").SerializeToString()
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                load(message, timeout=SECONDS)
            assert "no such table" in refused.value.details()
        # The watcher tries it again now and then.
        assert "no such table" in until_state(server, "broken", "failed")["reason"]
        shutil.copy(FIRST.write(tmp_path / "good" / "broken") / HOOKS, repo / "broken" / HOOKS)
        for _ in range(5):
            try:
                load(message, timeout=SECONDS)
                break
            except grpc.RpcError as error:
                # It joined what the watcher had begun before the file was whole.
                if "changed while the bundle was being read" not in error.details():
                    raise
    assert stamp(server, "broken") == FIRST.stamp


@pytest.mark.parametrize("name", [".hidden", "two\nlines", "back\\slash", os.fsdecode(b"\xff")])
def test_directories_with_names_that_no_model_may_have_are_left_alone(server, repo, tmp_path, name):
    shutil.copytree(FIRST.write(tmp_path / "fine"), repo / name)
    shutil.copytree(tmp_path / "fine", repo / "fine")
    until_state(server, "fine", "ready")
    assert {model["name"] for model in status(server)["models"]} == {"steady", "fine"}
