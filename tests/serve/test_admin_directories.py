"""Directories that administrators name: inside of the repository, whatever links and dots say."""

import os

import pytest

from rsrv.core.errors import InvalidRequest
from rsrv.serve.admin.directories import allowed_bundle, allowed_directory


@pytest.fixture
def roots(tmp_path):
    for name in ("a/net", "b/net", "b/other", "outside/net"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.yaml").write_text("")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_relative_path_is_looked_for_under_each_root(tmp_path, roots):
    assert allowed_bundle("net", roots, external=False) == tmp_path / "a" / "net"
    assert allowed_bundle("other", roots, external=False) == tmp_path / "b" / "other"


def test_dots_are_taken_out_of_the_path_that_is_used(tmp_path, roots):
    found = allowed_bundle(f"{roots[0]}/x/../net/.", roots, external=False)
    assert found == tmp_path / "a" / "net"
    with pytest.raises(InvalidRequest, match="is not under"):
        allowed_directory(f"{roots[0]}/../outside/net", roots, external=False)
    with pytest.raises(InvalidRequest, match="is not under"):
        allowed_directory("../outside/net", roots, external=False)


def test_what_somebody_linked_into_the_repository_is_in_it(tmp_path, roots):
    os.symlink(tmp_path / "outside" / "net", tmp_path / "a" / "linked")
    assert allowed_bundle("linked", roots, external=False) == tmp_path / "a" / "linked"


def test_a_link_from_outside_into_the_repository_is_in_it_too(tmp_path, roots):
    os.symlink(tmp_path / "a", tmp_path / "alias")
    assert allowed_bundle(str(tmp_path / "alias" / "net"), roots, external=False) == tmp_path / "alias" / "net"


def test_dots_after_a_link_do_not_lead_out(tmp_path, roots):
    os.symlink(tmp_path / "outside" / "net", tmp_path / "a" / "linked")
    # For the kernel this is outside/; for us it is a/.
    with pytest.raises(InvalidRequest):
        allowed_directory(f"{roots[0]}/linked/../net2", roots, external=False)


@pytest.mark.parametrize("given", ["/", ".", "nobody", "net\0"])
def test_what_is_not_there_or_is_no_bundle_is_refused(roots, given):
    with pytest.raises(InvalidRequest):
        allowed_bundle(given, roots, external=False)


def test_external_directories_are_taken_when_they_may_be(tmp_path, roots):
    outside = str(tmp_path / "outside" / "net")
    with pytest.raises(InvalidRequest, match="is not under") as caught:
        allowed_bundle(outside, roots, external=False)
    assert "admin.allow_external_dirs" in caught.value.hint
    assert str(allowed_bundle(outside, roots, external=True)) == outside
    with pytest.raises(InvalidRequest, match=r"has no manifest\.yaml"):
        allowed_bundle(str(tmp_path / "outside"), roots, external=True)


def test_a_root_is_no_directory_under_itself(roots):
    with pytest.raises(InvalidRequest, match="is not under"):
        allowed_directory(roots[0], roots, external=False)
