"""The watcher as a thread, on real directories and with the system's own events; it takes as long as it takes."""

import errno
import shutil
import threading
import time

import pytest
from repository_support import WAIT_SECONDS, Target, contents, told, write_bundle

from rsrv.core.config import ServerConfig
from rsrv.core.errors import BundleError
from rsrv.serve.repository import follower
from rsrv.serve.repository import watcher as watcher_module
from rsrv.serve.repository.events import InotifyObserver
from rsrv.serve.repository.snapshot import scan
from rsrv.serve.repository.watcher import Watcher

NEVER = 10**6
"""Seconds between two polls in a test of events."""
THREADS = {"rsrv-watcher", "rsrv-watch-hash", "rsrv-watch-compare"}


@pytest.fixture
def repo(tmp_path):
    path = tmp_path / "repo"
    write_bundle(path / "a")
    return path


@pytest.fixture
def watch():
    """Starts watchers that have polled once, and stops them."""
    watchers = []

    def start(*roots, poll_seconds=NEVER, settle_seconds=0.05, target=None, **options):
        config = ServerConfig(
            model_dirs=[str(root) for root in roots],
            model_poll_seconds=poll_seconds,
            model_settle_seconds=settle_seconds,
        )
        target = target or Target()
        watcher = Watcher(config, target, **options)
        watchers.append(watcher)
        snapshot = scan(roots)
        target.served = {name: contents(found.path) for name, found in snapshot.items()}
        watcher.seed(snapshot)
        watcher.start()
        watcher.poll_now(WAIT_SECONDS)
        return watcher, target

    yield start
    for watcher in watchers:
        watcher.stop()
    assert not THREADS & {thread.name for thread in threading.enumerate()}


def drop(root, name, **files):
    """A bundle that appears in one step, so that it does not matter how slow the test is."""
    write_bundle(root / f".{name}", **files).rename(root / name)


def overwrite(file, data):
    """Other bytes, at least as many, in one step: nobody sees the file empty, however slow the test is."""
    assert len(data) >= file.stat().st_size
    with open(file, "r+b", buffering=0) as opened:
        opened.write(data)


def edit(directory, data=b"other weights"):
    overwrite(directory / "weights.safetensors", data)


# --- events -------------------------------------------------------------------------------------------------------


def test_an_edit_a_new_bundle_and_a_removed_one_are_found_by_events_alone(watch, repo):
    _, target = watch(repo)
    edit(repo / "a")
    target.wait_for("reload a")
    assert target.served["a"] == contents(repo / "a")
    drop(repo, "b")
    target.wait_for("load b")
    assert target.served["b"] == contents(repo / "b")
    (repo / "a").rename(repo / ".a")
    target.wait_for("unload a")
    assert target.calls == ["reload a", "load b", "unload a"]


def test_a_file_that_is_replaced_in_one_step_is_found(watch, repo):
    _, target = watch(repo)
    (repo / "a" / "w.tmp").write_bytes(b"other weights")
    (repo / "a" / "w.tmp").rename(repo / "a" / "weights.safetensors")
    target.wait_for("reload a")


def test_a_bundle_that_is_moved_in_is_loaded_and_an_edit_of_it_is_found(watch, repo, tmp_path):
    _, target = watch(repo)
    write_bundle(tmp_path / "b").rename(repo / "b")
    target.wait_for("load b")
    edit(repo / "b")
    target.wait_for("reload b")


def test_a_renamed_bundle_keeps_being_watched_under_its_new_name(watch, repo):
    _, target = watch(repo)
    (repo / "a").rename(repo / "b")
    target.wait_for("rename a b")
    edit(repo / "b")
    target.wait_for("reload b")
    assert target.calls == ["rename a b", "reload b"]


def test_a_promotion_is_two_renames(watch, repo):
    write_bundle(repo / "m-staging")
    write_bundle(repo / "m-production")
    _, target = watch(repo)
    (repo / "m-production").rename(repo / "m-production-old")
    (repo / "m-staging").rename(repo / "m-production")
    target.wait_for("rename m-staging m-production")
    assert target.calls == ["rename m-production m-production-old", "rename m-staging m-production"]


def test_a_file_in_a_directory_of_a_bundle_and_a_new_directory_are_found(watch, repo):
    _, target = watch(repo)
    (repo / "a" / "tokenizer").mkdir()
    (repo / "a" / "tokenizer" / "vocab.txt").write_bytes(b"x")
    target.wait_for("reload a")
    target.take()
    (repo / "a" / "tokenizer" / "vocab.txt").write_bytes(b"xy")
    target.wait_for("reload a")


def test_a_link_that_leads_elsewhere_is_found_and_so_is_an_edit_behind_it(watch, repo):
    for version in ("v1", "v2"):
        write_bundle(repo / ".store" / version, weights=version.encode())
    (repo / "b").symlink_to(".store/v1")
    _, target = watch(repo)
    (repo / ".link").symlink_to(".store/v2")
    (repo / ".link").rename(repo / "b")
    target.wait_for("reload b")
    assert target.served["b"]["weights.safetensors"] == b"v2"
    target.take()
    edit(repo / ".store" / "v2")
    target.wait_for("reload b")


def test_a_mounted_config_map_that_is_exchanged_is_found(watch, repo):
    directory = repo / "b"
    write_bundle(directory / "..1", weights=b"1")
    (directory / "..data").symlink_to("..1")
    for name in ("manifest.yaml", "model.mlir", "weights.safetensors"):
        (directory / name).symlink_to(f"..data/{name}")
    _, target = watch(repo)
    write_bundle(directory / "..2", weights=b"2")
    (directory / "..data_tmp").symlink_to("..2")
    (directory / "..data_tmp").rename(directory / "..data")
    shutil.rmtree(directory / "..1")
    target.wait_for("reload b")
    assert target.served["b"]["weights.safetensors"] == b"2"


def test_a_file_that_a_bundle_links_to_is_watched_where_it_lies(watch, repo, tmp_path):
    (tmp_path / "shared").write_bytes(b"1")
    (repo / "a" / "weights.safetensors").unlink()
    (repo / "a" / "weights.safetensors").symlink_to(tmp_path / "shared")
    _, target = watch(repo)
    (tmp_path / "other").write_bytes(b"nobody links to it")
    overwrite(tmp_path / "shared", b"2nd")
    target.wait_for("reload a")
    assert target.calls == ["reload a"]


def test_a_root_that_is_a_link_and_leads_elsewhere_is_found(watch, repo, tmp_path):
    write_bundle(tmp_path / "release" / "b")
    (tmp_path / "current").symlink_to(repo)
    _, target = watch(tmp_path / "current")
    (tmp_path / "next").symlink_to(tmp_path / "release")
    (tmp_path / "next").rename(tmp_path / "current")
    target.wait_for("unload a", "load b")
    edit(tmp_path / "release" / "b")
    target.wait_for("reload b")


def test_a_root_that_goes_away_and_comes_back_leaves_its_models_alone_and_is_followed_again(watch, repo, tmp_path):
    watcher, target = watch(repo)
    repo.rename(tmp_path / "away")
    assert watcher.poll_now(WAIT_SECONDS) == []
    (tmp_path / "away").rename(repo)
    edit(repo / "a")
    target.wait_for("reload a")
    assert target.calls == ["reload a"]


def test_two_hundred_bundles_that_are_dropped_in_at_once_are_loaded_once_each(watch, repo):
    _, target = watch(repo)
    names = [f"m{number:03}" for number in range(200)]
    for name in names:
        drop(repo, name)
    target.wait_for(*(f"load {name}" for name in names))
    assert sorted(target.calls) == [f"load {name}" for name in names]
    assert all(len(target.served[name]) == 3 for name in names)


def test_a_bundle_that_is_written_slowly_is_loaded_once_and_complete(watch, repo):
    _, target = watch(repo, settle_seconds=2.0)
    (repo / "b").mkdir()
    pause = threading.Event()
    with open(repo / "b" / "weights.safetensors", "wb", buffering=0) as file:
        (repo / "b" / "manifest.yaml").write_bytes(b"first, though it should be last")
        for _ in range(20):
            file.write(bytes(1000))
            pause.wait(0.05)
    (repo / "b" / "model.mlir").write_bytes(b"program")
    target.wait_for("load b")
    assert target.calls == ["load b"]
    assert target.served["b"] == contents(repo / "b")


def test_a_bundle_behind_a_broken_manifest_is_loaded_as_soon_as_that_is_fixed(watch, repo):
    target = Target()
    target.errors["load b"] = BundleError("manifest.yaml is not a mapping")
    watch(repo, target=target)
    drop(repo, "b")
    target.wait_for("load b")
    del target.errors["load b"]
    target.take()
    overwrite(repo / "b" / "manifest.yaml", b"kind: model, and right")
    target.wait_for("load b")
    assert target.served["b"] == contents(repo / "b")


def test_events_that_the_kernel_dropped_are_a_look_at_everything(watch, repo):
    hints = []

    class Deaf:
        def __init__(self, hint):
            hints.append(hint)

        def follow(self, roots, places):
            return set()

        def stop(self):
            pass

    _, target = watch(repo, observer=Deaf)
    edit(repo / "a")
    write_bundle(repo / "b")
    hints[0](None, True)
    target.wait_for("reload a", "load b")


# --- polls --------------------------------------------------------------------------------------------------------


def test_without_events_the_polls_find_everything(watch, repo):
    _, target = watch(repo, poll_seconds=0.05, observer=None)
    edit(repo / "a")
    drop(repo, "b")
    target.wait_for("reload a", "load b")
    (repo / "b").rename(repo / ".b")
    target.wait_for("unload b")


def test_a_system_without_inotify_instances_is_polled_and_says_so_once(watch, repo, caplog):
    def none(hint):
        raise OSError(errno.EMFILE, "inotify instance limit reached")

    _, target = watch(repo, poll_seconds=0.05, observer=none)
    edit(repo / "a")
    target.wait_for("reload a")
    assert caplog.text.count("found by polling only") == 1


def test_a_system_without_inotify_watches_left_is_polled_and_says_so_once(watch, repo, caplog):
    class Limited(InotifyObserver):
        def __init__(self, hint):
            super().__init__(hint)
            self._inotify.add_callback = self.refuse

        def refuse(self, *arguments):
            raise OSError(errno.ENOSPC, "inotify watch limit reached")

    _, target = watch(repo, poll_seconds=0.05, observer=Limited)
    edit(repo / "a")
    target.wait_for("reload a")
    assert caplog.text.count("found by polling only") == 1


def test_a_round_that_is_asked_for_returns_what_it_has_begun(watch, repo):
    watcher, _ = watch(repo, observer=None)
    assert watcher.poll_now(WAIT_SECONDS) == []
    edit(repo / "a")
    write_bundle(repo / "b")
    assert told(watcher.poll_now(WAIT_SECONDS)) == ["reload a", "load b"]
    assert watcher.poll_now(WAIT_SECONDS) == []


def test_a_round_that_is_asked_for_waits_for_what_settles_also_when_its_look_takes_longer_than_that(
    watch, repo, monkeypatch
):
    skipped, scanned = [0.0], follower.scan

    def slow(*arguments):
        skipped[0] += 60.0
        return scanned(*arguments)

    watcher, _ = watch(repo, observer=None, clock=lambda: time.monotonic() + skipped[0])
    monkeypatch.setattr(follower, "scan", slow)
    edit(repo / "a")
    assert told(watcher.poll_now(WAIT_SECONDS)) == ["reload a"]


def test_a_round_can_be_asked_for_without_waiting(watch, repo):
    watcher, target = watch(repo, observer=None)
    edit(repo / "a")
    watcher.request_poll()
    target.wait_for("reload a")


def test_a_round_that_was_asked_for_does_not_wait_for_a_change_under_way(watch, repo):
    target = Target()
    target.hold.add("reload a")
    watcher, _ = watch(repo, observer=None, target=target)
    edit(repo / "a")
    assert told(watcher.poll_now(WAIT_SECONDS)) == ["reload a"]
    assert watcher.poll_now(WAIT_SECONDS) == []
    target.release("reload a")


def test_a_failing_round_is_a_warning_and_the_next_one_works(watch, repo, monkeypatch, caplog):
    watcher, target = watch(repo, observer=None)
    edit(repo / "a")
    with monkeypatch.context() as patch:
        patch.setattr(follower, "scan", lambda *arguments: 1 / 0)
        assert watcher.poll_now(WAIT_SECONDS) == []
    assert "a round failed" in caplog.text
    assert told(watcher.poll_now(WAIT_SECONDS)) == ["reload a"]
    target.wait_for("reload a")


# --- the thread ---------------------------------------------------------------------------------------------------


def test_stop_ends_the_thread_in_a_wait_of_days_and_lets_those_who_wait_go(watch, repo):
    watcher, _ = watch(repo, settle_seconds=NEVER, observer=None)
    edit(repo / "a")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(watcher.poll_now(WAIT_SECONDS)))
    waiting.start()
    pause = threading.Event()
    for _ in range(3000):
        if watcher._polls:
            break
        pause.wait(0.01)
    watcher.stop()
    waiting.join(WAIT_SECONDS)
    assert answers == [[]]
    assert watcher.poll_now(WAIT_SECONDS) == []
    watcher.stop()


def test_a_watcher_that_was_never_started_can_be_stopped(repo):
    Watcher(ServerConfig(model_dirs=[str(repo)]), Target()).stop()


def test_a_target_that_is_stopped_while_a_change_is_under_way_is_not_called_again(watch, repo):
    target = Target()
    target.hold.add("reload a")
    watcher, _ = watch(repo, target=target)
    edit(repo / "a")
    target.wait_for("reload a")
    watcher.stop()
    target.release("reload a", RuntimeError("the server is stopping"))
    assert target.calls == ["reload a"]


def test_an_unregistered_model_stays_away_until_an_edit(watch, repo):
    watcher, target = watch(repo)
    watcher.tombstone("a")
    assert [stone.name for stone in watcher.tombstones()] == ["a"]
    assert watcher.poll_now(WAIT_SECONDS) == []
    edit(repo / "a")
    target.wait_for("load a")
    assert target.calls == ["load a"]


def test_a_model_that_is_registered_again_is_reloaded_when_it_is_edited(watch, repo):
    watcher, target = watch(repo)
    watcher.tombstone("a")
    watcher.clear_tombstone("a")
    assert watcher.tombstones() == []
    edit(repo / "a")
    target.wait_for("reload a")


def test_many_events_do_not_make_for_nothing_but_looks(watch, repo, monkeypatch):
    looks = []
    look = watcher_module.Watcher._look
    monkeypatch.setattr(watcher_module.Watcher, "_look", lambda *arguments: (looks.append(1), look(*arguments)))
    _, target = watch(repo, settle_seconds=0.2)
    for number in range(500):
        (repo / "a" / "log").write_bytes(bytes(number))
    target.wait_for("reload a")
    assert len(looks) < 100
