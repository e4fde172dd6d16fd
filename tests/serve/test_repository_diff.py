"""From what is served to what is there, on plain values: the vectors of the specification."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository_support import by_name, seen, told

from rsrv.serve.repository.diff import diff, is_internal
from rsrv.serve.repository.snapshot import FileStat


def test_nothing_changed_is_nothing_to_do():
    served = by_name(seen("a", 1), seen("b", 2))
    assert diff(served, dict(served)) == ()


def test_what_is_new_is_loaded_what_is_gone_is_unloaded_what_differs_is_reloaded():
    served = by_name(seen("edited", 1), seen("gone", 2), seen("same", 3))
    now = by_name(seen("edited", 1, version=2), seen("same", 3), seen("new", 4))
    assert told(diff(served, now).flat) == ["unload gone", "reload edited", "load new"]


def test_a_file_more_or_less_is_a_reload():
    vocabulary = {"vocab.txt": FileStat(5, 7, 7, 50)}
    assert told(diff(by_name(seen("a")), by_name(seen("a", **vocabulary))).flat) == ["reload a"]
    assert told(diff(by_name(seen("a", **vocabulary)), by_name(seen("a"))).flat) == ["reload a"]


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode"])
def test_every_part_of_the_tuple_of_a_file_counts(field):
    one = {"size": 10, "mtime_ns": 7, "ctime_ns": 7, "inode": 3}
    served = by_name(seen("a", f=FileStat(**one)))
    now = by_name(seen("a", f=FileStat(**{**one, field: one[field] - 1})))
    assert told(diff(served, now).flat) == ["reload a"]


def test_another_directory_with_the_same_versions_of_all_files_is_no_change():
    old = seen("a", 1)
    remounted = seen("a", 1)
    object.__setattr__(remounted, "identity", (99, 1))
    assert diff(by_name(old), by_name(remounted)) == ()


def test_a_directory_with_another_name_is_a_rename():
    assert told(diff(by_name(seen("a", 1)), by_name(seen("b", 1))).flat) == ["rename a b"]


def test_the_change_says_where_the_directory_is_now():
    [change] = diff(by_name(seen("a", 1)), by_name(seen("b", 1, root="/other"))).flat
    assert str(change.path) == "/other/b"


def test_a_moved_directory_with_changed_contents_is_unloaded_and_loaded():
    assert told(diff(by_name(seen("a", 1)), by_name(seen("b", 1, version=2))).flat) == ["unload a", "load b"]


def test_a_second_name_for_a_directory_that_keeps_its_own_is_a_load():
    served, now = by_name(seen("a", 1)), by_name(seen("a", 1), seen("link", 1))
    assert told(diff(served, now).flat) == ["load link"]


def test_a_promotion_chain_is_two_renames_in_collision_order():
    served = by_name(seen("m-production", 1), seen("m-staging", 2))
    now = by_name(seen("m-production-old", 1), seen("m-production", 2))
    assert told(diff(served, now).flat) == ["rename m-production m-production-old", "rename m-staging m-production"]


def test_removing_a_model_and_moving_another_to_its_name_is_an_unload_and_a_rename():
    served = by_name(seen("m-production", 1), seen("m-staging", 2))
    now = by_name(seen("m-production", 2))
    assert told(diff(served, now).flat) == ["unload m-production", "rename m-staging m-production"]


def test_a_name_whose_model_moved_on_and_that_has_a_new_bundle_is_a_rename_and_a_load():
    served, now = by_name(seen("a", 1)), by_name(seen("b", 1), seen("a", 2))
    assert told(diff(served, now).flat) == ["rename a b", "load a"]


def test_an_occupant_that_moved_and_changed_is_unloaded_before_its_name_is_taken():
    served = by_name(seen("a", 1), seen("b", 2))
    now = by_name(seen("b", 1), seen("c", 2, version=5))
    assert told(diff(served, now).flat) == ["unload b", "rename a b", "load c"]


def test_two_directories_that_swapped_go_over_an_internal_name():
    served, now = by_name(seen("a", 1), seen("b", 2)), by_name(seen("a", 2), seen("b", 1))
    assert told(diff(served, now).flat) == ["rename a .a", "rename b a", "rename .a b"]
    assert is_internal(".a")


def test_a_cycle_of_three_with_a_chain_behind_it_moves_every_model_once():
    served = by_name(*(seen(name, number) for number, name in enumerate("abcd")))
    now = by_name(seen("b", 0), seen("c", 1), seen("a", 2), seen("e", 3))
    changes = diff(served, now).flat
    assert applied(served, changes) == {name: bundle.identity for name, bundle in now.items()}
    assert {change.action for change in changes} == {"rename"}
    assert len(changes) == 5


def test_a_longer_chain_is_applied_from_its_free_end():
    served = by_name(seen("v1", 1), seen("v2", 2), seen("v3", 3))
    now = by_name(seen("v2", 1), seen("v3", 2), seen("v4", 3))
    assert told(diff(served, now).flat) == ["rename v3 v4", "rename v2 v3", "rename v1 v2"]


def test_a_name_that_has_not_settled_waits_and_so_does_what_depends_on_it():
    served = by_name(seen("m-production", 1), seen("m-staging", 2), seen("other", 3))
    now = by_name(seen("m-production-old", 1), seen("m-production", 2), seen("other", 3, version=2))
    for name in ("m-production", "m-staging", "m-production-old"):
        assert told(diff(served, now, {name}).flat) == ["reload other"]


def test_a_directory_that_left_its_name_waits_for_where_it_went_even_when_that_changed():
    served, now = by_name(seen("a", 1)), by_name(seen("b", 1, version=2))
    assert diff(served, now, {"b"}) == ()
    assert diff(served, now, {"a"}) == ()


def test_changes_that_do_not_depend_on_each_other_are_groups_of_their_own():
    served = by_name(seen("a", 1), seen("b", 2), seen("c", 3))
    now = by_name(seen("x", 1), seen("y", 2), seen("z", 9))
    assert [told(group) for group in diff(served, now)] == [["unload c"], ["rename a x"], ["rename b y"], ["load z"]]


def applied(served, changes):
    """Names to directories, as a target has them that refuses what cannot be done."""
    state = {name: bundle.identity for name, bundle in served.items()}
    for change in changes:
        if change.action == "load":
            assert change.name not in state
            state[change.name] = "loaded"
        elif change.action == "rename":
            assert change.name not in state
            state[change.name] = state.pop(change.source)
        elif change.action == "unload":
            del state[change.name]
        else:
            assert change.name in state
            state[change.name] = "loaded"
    return state


worlds = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 5), st.integers(1, 2)), max_size=5)


def world(places):
    used, bundles = set(), []
    for name, (identity, version) in places.items():
        if identity not in used:
            used.add(identity)
            bundles.append(seen(name, identity, version=version))
    return by_name(*bundles)


@given(worlds, worlds)
def test_every_change_can_be_applied_in_its_order_and_what_only_moved_is_never_loaded(before, after):
    served, now = world(before), world(after)
    changes = diff(served, now)
    state = applied(served, changes.flat)
    assert state.keys() == now.keys()
    versions = {bundle.identity: bundle.files for bundle in served.values()}
    for name, bundle in now.items():
        same_name = name in served and served[name].files == bundle.files
        moved = versions.get(bundle.identity) == bundle.files
        assert state[name] == (bundle.identity if same_name or moved else "loaded")
    groups = [{name for change in group for name in (change.name, change.source)} - {""} for group in changes]
    assert not any(one & other for one, other in itertools.combinations(groups, 2))
