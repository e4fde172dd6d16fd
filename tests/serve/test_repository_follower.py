"""What becomes of changes in real directories, with a clock that only the test moves and a target that it scripts."""

import os
import shutil

import pytest
from repository_support import Site, contents, write_bundle

from rsrv.core.errors import BundleError, NameTaken, UnknownModel
from rsrv.serve.repository.contents import PART_BYTES, Contents
from rsrv.serve.repository.snapshot import scan


@pytest.fixture
def repo(tmp_path):
    path = tmp_path / "repo"
    path.mkdir()
    return path


@pytest.fixture
def site(repo):
    """One model `a` is served from `repo`."""
    write_bundle(repo / "a")
    return Site(repo).seed()


def edit(directory, data=b"other weights"):
    (directory / "weights.safetensors").write_bytes(data)


def move_into(root, name, data=b"weights"):
    """A bundle that appears in one step."""
    write_bundle(root / ".new", weights=data)
    (root / ".new").rename(root / name)


# --- add, edit, remove --------------------------------------------------------------------------------------------


def test_the_first_round_after_the_start_does_nothing(site):
    assert site.settle() == []


def test_a_new_bundle_is_loaded_at_the_second_equal_look(site, repo):
    write_bundle(repo / "b")
    assert site.poll(15) == []
    assert site.look(0.5) == ["load b"]
    assert site.target.served["b"] == contents(repo / "b")
    assert site.settle() == []


def test_an_edited_bundle_is_reloaded_with_its_new_weights(site, repo):
    edit(repo / "a")
    assert site.poll(15) == []
    assert site.look(0.5) == ["reload a"]
    assert site.target.served["a"]["weights.safetensors"] == b"other weights"
    assert site.settle() == []


def test_a_removed_bundle_is_unloaded(site, repo):
    shutil.rmtree(repo / "a")
    assert site.poll(15) == []
    assert site.look(0.5) == ["unload a"]
    assert site.settle() == []


@pytest.mark.parametrize("name", ["vocab.txt", "model.v1.b4.mlir", "model.py"])
def test_every_file_of_a_bundle_counts(site, repo, name):
    (repo / "a" / name).write_bytes(b"new")
    assert site.settle() == ["reload a"]
    (repo / "a" / name).write_bytes(b"edited")
    site.hash()
    assert site.settle() == ["reload a"]
    (repo / "a" / name).unlink()
    assert site.settle() == ["reload a"]


def test_a_touched_file_a_chmod_and_a_hard_link_change_nothing(site, repo):
    os.utime(repo / "a" / "weights.safetensors")
    assert site.settle() == []
    (repo / "a" / "manifest.yaml").chmod(0o600)
    assert site.settle() == []
    os.link(repo / "a" / "model.mlir", repo / "backup")
    assert site.settle() == []


def test_a_rewritten_file_with_the_same_bytes_changes_nothing_and_with_others_does_even_with_the_old_mtime(site, repo):
    file = repo / "a" / "weights.safetensors"
    before = os.stat(file)
    shutil.copy2(file, repo / "a" / "w.tmp")
    (repo / "a" / "w.tmp").rename(file)
    assert site.settle() == []
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert site.settle() == ["reload a"]


def test_swap_files_of_an_editor_change_nothing(site, repo):
    for name in (".manifest.yaml.swp", "manifest.yaml~", "w.partial"):
        (repo / "a" / name).write_bytes(b"x")
    assert site.settle() == []
    assert not site.follower.is_waiting


def test_a_large_file_that_was_touched_is_read_elsewhere_and_then_taken_as_the_same(repo):
    file = write_bundle(repo / "a", weights=bytes(2 * PART_BYTES)) / "weights.safetensors"
    site = Site(repo).seed()
    os.utime(file)
    assert site.settle() == []
    site.hash()
    assert [*site.look(), *site.look()] == []
    assert not site.follower.is_waiting
    assert site.settle() == []


def test_a_large_file_that_differs_at_its_end_is_reloaded_once_it_was_read(repo):
    write_bundle(repo / "a", weights=bytes(2 * PART_BYTES))
    site = Site(repo).seed()
    edit(repo / "a", bytes(2 * PART_BYTES - 1) + b"x")
    assert site.settle() == []
    site.hash()
    assert site.look() == ["reload a"]
    assert site.settle() == []


def test_a_large_file_is_read_while_its_change_settles(repo):
    write_bundle(repo / "a", weights=bytes(2 * PART_BYTES))
    site = Site(repo).seed()
    edit(repo / "a", bytes(2 * PART_BYTES - 1) + b"x")
    assert site.poll(15) == []
    site.hash()
    assert site.look(0.5) == ["reload a"]


def test_what_was_read_at_the_first_look_is_not_read_again_at_the_second(site, repo, monkeypatch):
    compared = []
    differ = Contents.differ
    monkeypatch.setattr(Contents, "differ", lambda *arguments: (compared.append(1), differ(*arguments))[1])
    edit(repo / "a", b"WEIGHTS")
    assert site.settle() == ["reload a"]
    assert len(compared) == 1


# --- half written bundles -----------------------------------------------------------------------------------------


def test_a_bundle_that_is_being_copied_is_loaded_when_it_is_complete(site, repo):
    write_bundle(repo / "b", weights=b"")
    assert site.poll(15) == []
    for size in range(1, 20):
        edit(repo / "b", bytes(size))
        assert site.look(0.5) == []
    assert site.look(0.5) == ["load b"]
    assert len(site.target.served["b"]["weights.safetensors"]) == 19


def test_events_of_a_writer_hold_the_change_up_until_it_has_been_quiet_for_the_settle_time(site, repo):
    for size in range(5):
        edit(repo / "a", bytes(size))
        site.event("a")
        assert site.look(0.875) == []
    edit(repo / "a")
    site.event("a")
    assert site.look(0.5) == []
    assert site.look(0.375) == []
    assert site.look(0.125) == ["reload a"]


def test_a_writer_that_stalls_leaves_a_failed_load_that_the_next_file_puts_right(site, repo):
    site.target.errors["load b"] = BundleError("no weights.safetensors")
    write_bundle(repo / "b")
    (repo / "b" / "weights.safetensors").unlink()
    assert site.settle() == ["load b"]
    for _ in range(3):
        assert site.look(1.0) == []
    del site.target.errors["load b"]
    edit(repo / "b")
    site.event("b")
    assert site.look(0.5) == []
    assert site.look(0.5) == ["load b"]


def test_a_directory_without_a_manifest_is_not_a_bundle_yet(site, repo):
    write_bundle(repo / "b")
    (repo / "b" / "manifest.yaml").rename(repo / "b" / ".manifest.yaml")
    assert site.settle() == []
    (repo / "b" / ".manifest.yaml").rename(repo / "b" / "manifest.yaml")
    assert site.settle() == ["load b"]


def test_a_manifest_that_vanished_means_changing_until_two_rounds_have_seen_it(site, repo):
    manifest = repo / "a" / "manifest.yaml"
    data = manifest.read_bytes()
    manifest.unlink()
    assert site.settle() == []
    assert [*site.look(0.5), *site.look(0.5), *site.look(5)] == []
    manifest.write_bytes(data + b" ")
    assert site.settle() == ["reload a"]
    manifest.unlink()
    assert site.settle() == []
    assert site.settle() == ["unload a"]


# --- renames ------------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(repo):
    """`m-production` and `m-staging` are served."""
    for name in ("m-production", "m-staging"):
        write_bundle(repo / name, weights=name.encode())
    return Site(repo).seed()


def test_a_renamed_directory_is_a_rename(site, repo):
    (repo / "a").rename(repo / "b")
    assert site.settle() == ["rename a b"]
    assert site.settle() == []
    edit(repo / "b")
    assert site.settle() == ["reload b"]


def test_a_promotion_is_two_renames(staged, repo):
    (repo / "m-production").rename(repo / "m-production-old")
    (repo / "m-staging").rename(repo / "m-production")
    assert staged.settle() == ["rename m-production m-production-old", "rename m-staging m-production"]
    assert staged.target.served["m-production"]["weights.safetensors"] == b"m-staging"
    assert staged.settle() == []


def test_removing_and_moving_is_an_unload_and_a_rename(staged, repo):
    shutil.rmtree(repo / "m-production")
    (repo / "m-staging").rename(repo / "m-production")
    assert staged.settle() == ["unload m-production", "rename m-staging m-production"]
    assert staged.settle() == []


def test_a_rename_waits_until_the_name_is_free(staged, repo):
    staged.target.hold.add("unload m-production")
    shutil.rmtree(repo / "m-production")
    (repo / "m-staging").rename(repo / "m-production")
    assert staged.settle() == ["unload m-production"]
    assert staged.settle() == []
    staged.target.release("unload m-production")
    assert staged.look() == ["rename m-staging m-production"]
    assert staged.settle() == []


def test_two_directories_that_swapped_are_renamed_over_an_internal_name(staged, repo):
    (repo / "m-production").rename(repo / "x")
    (repo / "m-staging").rename(repo / "m-production")
    (repo / "x").rename(repo / "m-staging")
    assert staged.settle() == [
        "rename m-production .m-production",
        "rename m-staging m-production",
        "rename .m-production m-staging",
    ]
    assert {name: files["weights.safetensors"] for name, files in staged.target.served.items()} == {
        "m-production": b"m-staging",
        "m-staging": b"m-production",
    }
    assert staged.settle() == []


@pytest.mark.parametrize("swapped", [False, True])
def test_renames_that_depend_on_each_other_are_given_to_the_target_as_one_step(staged, repo, monkeypatch, swapped):
    steps = []
    rename = staged.target.rename
    monkeypatch.setattr(staged.target, "rename", lambda moves: [steps.append(len(moves)), rename(moves)])
    (repo / "m-production").rename(repo / "m-production-old")
    (repo / "m-staging").rename(repo / "m-production")
    if swapped:
        (repo / "m-production-old").rename(repo / "m-staging")
    staged.settle()
    assert steps == [3 if swapped else 2]


def test_a_rename_that_the_target_refuses_becomes_an_unload_and_a_load(site, repo):
    site.target.errors["rename a b"] = NameTaken("no")
    (repo / "a").rename(repo / "b")
    assert site.settle() == ["rename a b", "unload a", "load b"]
    assert site.settle() == []


def test_a_refused_rename_in_a_cycle_leaves_no_model_under_an_internal_name(staged, repo):
    staged.target.errors["rename .m-production m-staging"] = NameTaken("no")
    (repo / "m-production").rename(repo / "x")
    (repo / "m-staging").rename(repo / "m-production")
    (repo / "x").rename(repo / "m-staging")
    staged.settle()
    assert {name: files["weights.safetensors"] for name, files in staged.target.served.items()} == {
        "m-production": b"m-staging",
        "m-staging": b"m-production",
    }
    assert staged.settle() == []


def test_a_moved_directory_with_other_files_is_unloaded_and_loaded(site, repo):
    (repo / "a").rename(repo / "b")
    edit(repo / "b")
    assert site.settle() == ["unload a", "load b"]


def test_a_directory_that_is_renamed_while_somebody_writes_to_it_waits(site, repo):
    (repo / "a").rename(repo / "b")
    assert site.poll(15) == []
    edit(repo / "b")
    assert site.look(0.5) == []
    assert site.look(0.5) == ["unload a", "load b"]


def test_a_bundle_that_moves_to_another_root_under_its_name_is_reloaded_from_there(tmp_path):
    write_bundle(tmp_path / "one" / "a")
    (tmp_path / "two").mkdir()
    site = Site(tmp_path / "one", tmp_path / "two").seed()
    (tmp_path / "one" / "a").rename(tmp_path / "two" / "a")
    assert site.settle() == ["reload a"]
    assert site.settle() == []


# --- links --------------------------------------------------------------------------------------------------------


def test_a_link_that_leads_to_another_version_is_a_reload_and_to_an_equal_one_nothing(repo):
    write_bundle(repo / ".store" / "v1", weights=b"1")
    write_bundle(repo / ".store" / "v2", weights=b"2")
    shutil.copytree(repo / ".store" / "v2", repo / ".store" / "v2-again")
    (repo / "a").symlink_to(".store/v1")
    site = Site(repo).seed()
    for version, done in [("v2", ["reload a"]), ("v2-again", [])]:
        site.hash()
        (repo / ".link").symlink_to(f".store/{version}")
        (repo / ".link").rename(repo / "a")
        assert site.settle() == done
    assert site.target.served["a"]["weights.safetensors"] == b"2"
    (repo / "a").unlink()
    assert site.settle() == ["unload a"]


def test_a_mounted_config_map_that_is_exchanged_is_a_reload(repo):
    directory = repo / "a"
    write_bundle(directory / "..2024_01", weights=b"1")
    (directory / "..2024_01" / "tokenizer").mkdir()
    (directory / "..data").symlink_to("..2024_01")
    for name in ("manifest.yaml", "model.mlir", "weights.safetensors", "tokenizer"):
        (directory / name).symlink_to(f"..data/{name}")
    site = Site(repo).seed()
    assert site.settle() == []
    write_bundle(directory / "..2024_02", weights=b"2")
    (directory / "..2024_02" / "tokenizer").mkdir()
    (directory / "..data_tmp").symlink_to("..2024_02")
    (directory / "..data_tmp").rename(directory / "..data")
    shutil.rmtree(directory / "..2024_01")
    assert site.settle() == ["reload a"]
    assert (directory / "weights.safetensors").read_bytes() == b"2"
    assert site.settle() == []


def test_a_root_that_is_a_link_and_leads_elsewhere_changes_all_bundles(tmp_path):
    for version in ("1", "2"):
        write_bundle(tmp_path / f"release-{version}" / "a", weights=version.encode())
    write_bundle(tmp_path / "release-2" / "b")
    (tmp_path / "current").symlink_to("release-1")
    site = Site(tmp_path / "current").seed()
    (tmp_path / "next").symlink_to("release-2")
    (tmp_path / "next").rename(tmp_path / "current")
    assert site.settle() == ["reload a", "load b"]


# --- roots --------------------------------------------------------------------------------------------------------


def test_models_of_a_root_that_is_away_stay_and_nothing_happens_when_it_returns(site, repo, tmp_path, caplog):
    repo.rename(tmp_path / "away")
    for _ in range(3):
        assert site.settle() == []
    assert caplog.text.count("model directory is away") == 1
    (tmp_path / "away").rename(repo)
    assert site.settle() == []
    edit(repo / "a")
    assert site.settle() == ["reload a"]


def test_models_stay_when_a_root_was_unmounted_and_only_its_empty_mount_point_is_left(site, repo, tmp_path):
    device, inode = site.follower._devices[repo]
    site.follower._devices[repo] = (device + 1, inode)  # what was mounted was another device
    shutil.rmtree(repo / "a")
    assert site.settle() == []
    assert site.settle() == []
    write_bundle(repo / "a")
    assert site.settle() == []  # equal files: nothing changed
    shutil.rmtree(repo / "a")
    assert site.settle() == ["unload a"]


def test_the_other_roots_are_followed_while_one_is_away(tmp_path):
    for root in ("one", "two"):
        write_bundle(tmp_path / root / root)
    site = Site(tmp_path / "one", tmp_path / "two").seed()
    (tmp_path / "one").rename(tmp_path / "away")
    edit(tmp_path / "two" / "two")
    assert site.settle() == ["reload two"]


def test_the_second_of_two_bundles_with_one_name_is_loaded_when_the_first_goes(tmp_path):
    for root in ("one", "two"):
        write_bundle(tmp_path / root / "a", weights=root.encode())
    site = Site(tmp_path / "one", tmp_path / "two").seed()
    edit(tmp_path / "two" / "a", b"2nd")
    assert site.settle() == []
    shutil.rmtree(tmp_path / "one" / "a")
    assert site.settle() == ["reload a"]
    assert site.target.served["a"]["weights.safetensors"] == b"2nd"


def test_a_second_bundle_with_equal_files_is_loaded_too_since_hooks_may_read_them_later(tmp_path):
    for root in ("one", "two"):
        write_bundle(tmp_path / root / "a")
    site = Site(tmp_path / "one", tmp_path / "two").seed()
    shutil.rmtree(tmp_path / "one" / "a")
    assert site.settle() == ["reload a"]


def test_a_directory_that_was_replaced_by_a_file_is_unloaded(site, repo):
    shutil.rmtree(repo / "a")
    (repo / "a").write_bytes(b"")
    assert site.settle() == ["unload a"]


def test_only_included_names_are_followed(repo):
    site = Site(repo, include=["b"])
    write_bundle(repo / "a")
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]


def test_names_that_are_not_allowed_are_given_to_the_target_which_refuses_them(site, repo, caplog):
    name = os.fsdecode(b"latin-\xe9\n")
    site.target.errors[f"load {name}"] = BundleError("a bundle cannot be called so")
    write_bundle(repo / name)
    write_bundle(repo / "b")
    assert sorted(site.settle()) == sorted([f"load {name}", "load b"])
    assert f"change failed name=latin-\\udce9\\n action=load dir={repo}/latin-\\udce9\\n " in caplog.text


# --- what is under way, and failures ------------------------------------------------------------------------------


def test_a_name_with_a_change_under_way_waits_until_it_has_ended(site, repo):
    site.target.hold.add("reload a")
    edit(repo / "a", b"first")
    assert site.settle() == ["reload a"]
    edit(repo / "a", b"second")
    assert site.settle() == []
    site.target.hold.clear()
    site.target.release("reload a")
    assert site.look() == ["reload a"]
    assert site.target.served["a"]["weights.safetensors"] == b"second"


def test_a_bundle_that_vanishes_while_it_compiles_is_unloaded_afterwards(site, repo):
    site.target.hold.add("load b")
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]
    shutil.rmtree(repo / "b")
    assert site.settle() == []
    site.target.release("load b", BundleError("gone"))
    assert [site.look(), site.look(0.5)] == [[], ["unload b"]]
    assert site.settle() == []


def test_two_hundred_bundles_at_once_are_all_given_to_the_target(site, repo):
    names = [f"m{number:03}" for number in range(200)]
    site.target.hold.update(f"load {name}" for name in names)
    for name in names:
        write_bundle(repo / name)
    assert site.settle() == [f"load {name}" for name in names]
    for name in names:
        site.target.release(f"load {name}")
    assert site.settle() == []
    assert sorted(site.target.served) == sorted(["a", *names])


def test_a_failed_change_is_tried_again_after_1_2_4_and_at_last_every_32_rounds(site, repo):
    site.target.errors["load b"] = BundleError("broken")
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]
    tried = [number for number in range(1, 200) if site.settle() == ["load b"]]
    assert tried == [1, 3, 7, 15, 31, 63, 95, 127, 159, 191]


def test_a_failed_change_is_tried_at_once_when_the_files_change_and_then_counts_anew(site, repo):
    site.target.errors["reload a"] = BundleError("broken")
    for size in range(1, 6):
        edit(repo / "a", bytes(size))
        assert site.settle() == ["reload a"]
    assert site.settle() == ["reload a"]
    assert site.settle() == []
    del site.target.errors["reload a"]
    edit(repo / "a", b"good")
    assert site.settle() == ["reload a"]
    for _ in range(5):
        assert site.settle() == []


def test_a_broken_bundle_that_gets_its_old_content_back_is_reloaded_so_that_the_error_goes(site, repo):
    manifest = repo / "a" / "manifest.yaml"
    data = manifest.read_bytes()
    site.target.errors["reload a"] = BundleError("broken")
    manifest.write_bytes(b"{")
    assert site.settle() == ["reload a"]
    del site.target.errors["reload a"]
    manifest.write_bytes(data)
    assert site.settle() == ["reload a"]
    assert site.settle() == []


def test_a_broken_version_that_is_moved_away_again_is_reloaded_too(site, repo):
    site.target.errors["reload a"] = BundleError("broken")
    (repo / "a").rename(repo / ".good")
    move_into(repo, "a", b"bad")
    assert site.settle() == ["reload a"]
    del site.target.errors["reload a"]
    shutil.rmtree(repo / "a")
    (repo / ".good").rename(repo / "a")
    assert site.settle() == ["reload a"]
    assert site.settle() == []


def test_a_bundle_that_failed_and_goes_is_unloaded(site, repo):
    site.target.errors["load b"] = BundleError("broken")
    write_bundle(repo / "b")
    site.settle()
    shutil.rmtree(repo / "b")
    assert site.settle() == ["unload b"]
    assert site.settle() == []


def test_an_unload_that_failed_is_tried_again_and_one_of_an_unknown_model_has_succeeded(site, repo):
    site.target.errors["unload a"] = RuntimeError("the device does not answer")
    shutil.rmtree(repo / "a")
    assert site.settle() == ["unload a"]
    site.target.errors["unload a"] = UnknownModel("unknown model: 'a'")
    assert site.settle() == ["unload a"]
    assert site.settle() == []


def test_a_model_that_failed_at_the_start_is_tried_again_only_when_its_files_change(site, repo):
    for _ in range(5):
        assert site.settle() == []
    edit(repo / "a")
    assert site.settle() == ["reload a"]


def test_an_edit_while_the_server_starts_is_found(repo):
    write_bundle(repo / "a")
    site = Site(repo)
    snapshot = scan([repo])
    edit(repo / "a")
    site.follower.seed(snapshot)
    assert site.settle() == ["reload a"]


def test_a_name_that_somebody_else_registered_is_left_alone(site, repo, caplog):
    site.target.errors["load b"] = NameTaken("model 'b' is registered already")
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]
    for _ in range(5):
        assert site.settle() == []
    assert "name taken" in caplog.text
    shutil.rmtree(repo / "b")
    assert site.settle() == []


def test_a_target_that_raises_at_once_has_failed_like_one_that_fails_later(site, repo):
    def load(name, path):
        raise RuntimeError("no threads")

    site.target.load = load
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]
    del site.target.load
    assert site.settle() == ["load b"]
    assert site.settle() == []


def test_changes_are_logged_with_name_action_and_directory(staged, repo, caplog):
    caplog.set_level("INFO")
    (repo / "m-staging").rename(repo / "next")
    write_bundle(repo / "new")
    staged.settle()
    assert f"watcher: change detected name=next action=rename dir={repo}/next from=m-staging" in caplog.messages
    assert f"watcher: change detected name=new action=load dir={repo}/new" in caplog.messages


# --- tombstones ---------------------------------------------------------------------------------------------------


def test_a_tombstone_stops_the_model_from_being_loaded_again_until_its_files_change(site, repo):
    site.follower.tombstone("a")
    [stone] = site.follower.tombstones()
    assert stone.name == "a"
    assert stone.signature == site.follower.snapshot["a"].signature
    site.hash()
    assert site.settle() == []
    os.utime(repo / "a" / "weights.safetensors")
    assert site.settle() == []
    edit(repo / "a")
    assert site.settle() == ["load a"]
    assert site.follower.tombstones() == []


def test_a_tombstone_goes_with_its_directory_and_no_model_is_unloaded(site, repo):
    site.follower.tombstone("a")
    (repo / "a").rename(repo / ".a")
    assert site.settle() == []
    assert site.follower.tombstones() == []
    (repo / ".a").rename(repo / "a")
    assert site.settle() == ["load a"]


def test_a_buried_directory_with_another_name_is_another_model(site, repo):
    site.follower.tombstone("a")
    (repo / "a").rename(repo / "b")
    assert site.settle() == ["load b"]


def test_a_model_that_was_registered_again_is_followed_again(site, repo):
    site.follower.tombstone("a")
    site.follower.clear_tombstone("a")
    assert site.follower.tombstones() == []
    assert site.settle() == []
    edit(repo / "a")
    assert site.settle() == ["reload a"]


def test_an_edit_that_waits_to_settle_is_not_lost_when_the_model_stays_after_all(site, repo):
    edit(repo / "a")
    assert site.poll(15) == []
    site.follower.tombstone("a")
    site.follower.clear_tombstone("a")
    assert site.settle() == ["reload a"]
    assert site.settle() == []


def test_a_model_that_is_unregistered_while_it_is_reloaded_stays_away(site, repo):
    site.target.hold.add("reload a")
    edit(repo / "a")
    assert site.settle() == ["reload a"]
    site.follower.tombstone("a")
    site.target.release("reload a", UnknownModel("unknown model: 'a'"))
    for _ in range(4):
        assert site.settle() == []
    assert [stone.name for stone in site.follower.tombstones()] == ["a"]


def test_a_model_that_is_unregistered_while_its_reload_is_decided_is_not_reloaded(site, repo, monkeypatch):
    differ = Contents.differ

    def unregistered(*arguments):
        site.follower.tombstone("a")
        return differ(*arguments)

    monkeypatch.setattr(Contents, "differ", unregistered)
    edit(repo / "a")
    assert [*site.settle(), *site.settle()] == []


def test_a_change_that_waits_to_settle_is_part_of_what_the_tombstone_buries(site, repo):
    edit(repo / "a")
    assert site.poll(15) == []
    site.follower.tombstone("a")
    assert [*site.look(0.5), *site.settle(), *site.settle()] == []


def test_a_tombstone_of_something_that_is_in_no_model_directory_is_none(site):
    site.follower.tombstone("elsewhere")
    assert site.follower.tombstones() == []


# --- looks between the rounds -------------------------------------------------------------------------------------


def test_a_look_between_rounds_sees_where_something_happened_and_what_is_new_or_gone(site, repo):
    write_bundle(repo / "b")
    assert site.settle() == ["load b"]
    edit(repo / "a")
    edit(repo / "b")
    site.event("b")
    assert [*site.look(0.5), *site.look(0.5)] == ["reload b"]
    assert site.settle() == ["reload a"]


def test_an_event_that_nobody_knows_the_bundle_of_is_a_look_at_all(site, repo):
    edit(repo / "a")
    write_bundle(repo / "b")
    site.follower.event(None, site.now)
    assert site.follower.next_due(site.now) < site.now + 0.5
    assert [*site.look(0.5), *site.look(0.5)] == ["reload a", "load b"]


def test_clock_steps_do_not_matter_since_only_differences_of_the_monotonic_clock_count(site, repo):
    edit(repo / "a")
    os.utime(repo / "a" / "weights.safetensors", ns=(0, 4 * 10**18))  # in a hundred years
    assert site.settle() == ["reload a"]
    edit(repo / "a", b"older weights")
    os.utime(repo / "a" / "weights.safetensors", ns=(0, 0))
    site.hash()
    assert site.settle() == ["reload a"]
