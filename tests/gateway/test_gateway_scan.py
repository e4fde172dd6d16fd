"""From the workers' lists to the routing table."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stub_worker import index_of

from rsrv.core.errors import Code, InvalidResponse
from rsrv.gateway.discovery.scan import KEPT_ROUNDS, Listing, fold, presence_of, read_listing, route
from rsrv.gateway.routing.table import NotReady
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb
from rsrv.serve.registry import Entry


@pytest.mark.parametrize(
    ("outcome", "answer"),
    [
        (Outcome(Code.OK, pb.ServerReadyResponse(ready=True).SerializeToString()), "ready"),
        (Outcome(Code.OK, b""), "unready"),
        (Outcome(Code.OK, b"\xff\xff"), "unready"),
        (Outcome(Code.DEADLINE_EXCEEDED), "silent"),
        (Outcome(Code.CANCELLED), "silent"),
        (Outcome(Code.UNAVAILABLE), "refused"),
        (Outcome(Code.UNAVAILABLE, trailers={"rsrv-reason": "stopping"}), "unready"),
        (Outcome(Code.UNIMPLEMENTED), "unready"),
        (Outcome(Code.INTERNAL), "unready"),
    ],
)
def test_what_a_probe_says_of_a_worker(outcome, answer):
    assert presence_of(outcome) == answer


def test_a_listing_keeps_the_names_of_models_that_are_not_served_and_why():
    listing = read_listing(
        index_of(
            "b",
            "a",
            c="preparing",
            d="registered",
            e="compile: no such op",
            f="not resident",
            g="the server is stopping",
        )
    )
    assert listing.ready == {"a", "b"}
    assert listing.missing == {
        "c": NotReady("preparing", "preparing"),
        "d": NotReady("preparing", "registered"),
        "e": NotReady("failed", "compile: no such op"),
        "f": NotReady("preparing", "not resident"),
        "g": NotReady("preparing", "the server is stopping"),
    }


def test_a_model_whose_hooks_are_still_being_imported_is_no_failed_one():
    entry = Entry("m", Path("m"), importing_since=0.0)
    assert entry.reason.startswith("preparing: its hooks")
    assert read_listing(index_of(m=entry.reason)).missing == {"m": NotReady("preparing", entry.reason)}


def test_a_row_without_a_name_is_none_and_a_state_stands_in_for_a_missing_reason():
    answer = pb.RepositoryIndexResponse()
    answer.models.add(name="", state="READY")
    answer.models.add(name="m", state="UNAVAILABLE")
    listing = read_listing(answer.SerializeToString())
    assert (listing.ready, listing.missing) == (frozenset(), {"m": NotReady("preparing", "unavailable")})


def test_garbage_is_no_listing():
    with pytest.raises(InvalidResponse, match="3 bytes"):
        read_listing(b"\xff\xff\xff")


@pytest.mark.parametrize("answer", ["ready", "unready", "silent"])
def test_a_worker_that_lists_nothing_keeps_its_routes_for_three_rounds(answer):
    listings = {"w:1": Listing(frozenset({"m"}))}
    for _ in range(KEPT_ROUNDS):
        listings = fold(listings, {}, {"w:1": answer})
        assert route(listings, {"w:1"}).urls("m") == ("w:1",)
    listings = fold(listings, {}, {"w:1": answer})
    table = route(listings, {"w:1"})
    assert table.urls("m") == ()
    assert table.not_ready("m") == NotReady("preparing", "worker w:1 does not answer")


def test_a_worker_that_answers_in_between_starts_its_three_rounds_anew():
    listings = {"w:1": Listing(frozenset({"m"}), misses=3)}
    listings = fold(listings, {"w:1": Listing(frozenset({"m"}))}, {"w:1": "ready"})
    assert listings["w:1"].misses == 0


def test_a_worker_that_refuses_loses_its_routes_at_once_but_its_models_stay_known():
    listings = fold({"w:1": Listing(frozenset({"m"}))}, {}, {"w:1": "refused"})
    table = route(listings, {"w:1"})
    assert table.urls("m") == ()
    assert table.knows("m")


def test_a_worker_that_left_is_forgotten():
    listings = fold({"w:1": Listing(frozenset({"m"}))}, {}, {"w:2": "ready"})
    assert not route(listings, {"w:2"}).knows("m")


def test_the_table_has_the_workers_of_each_model_sorted():
    listings = {
        "w:2": Listing(frozenset({"both", "only2"})),
        "w:1": Listing(frozenset({"both"}), {"only2": NotReady("failed", "compile: no")}),
    }
    table = route(listings, {"w:1", "w:2"})
    assert table.urls("both") == ("w:1", "w:2")
    assert table.urls("only2") == ("w:2",)
    assert table.not_ready("only2") is None
    assert len(table) == 2


def test_a_model_that_comes_up_somewhere_is_preparing_although_it_failed_elsewhere():
    failed, preparing = NotReady("failed", "compile: no"), NotReady("preparing", "preparing")
    for first, second in [(failed, preparing), (preparing, failed)]:
        table = route({"w:1": Listing(missing={"m": first}), "w:2": Listing(missing={"m": second})}, {"w:1", "w:2"})
        assert table.not_ready("m") == preparing
    assert route({"w:1": Listing(missing={"m": failed})}, {"w:1"}).not_ready("m") == failed


def test_a_worker_that_is_not_routable_has_no_routes_and_its_models_are_known():
    listings = {"w:1": Listing(frozenset({"m", "n"})), "w:2": Listing(frozenset({"n"}))}
    table = route(listings, {"w:2"})
    assert table.urls("n") == ("w:2",)
    assert table.not_ready("m") == NotReady("preparing", "worker w:1 takes no requests now")


NAMES = st.sampled_from("abc")
LISTINGS = st.dictionaries(
    st.sampled_from(["w:1", "w:2", "w:3"]),
    st.builds(
        lambda ready, missing: Listing(
            frozenset(ready), {name: why for name, why in missing.items() if name not in ready}
        ),
        st.sets(NAMES),
        st.dictionaries(NAMES, st.sampled_from([NotReady("preparing", "preparing"), NotReady("failed", "no")])),
    ),
)


@settings(deadline=None)
@given(LISTINGS, st.sets(st.sampled_from(["w:1", "w:2", "w:3"])))
def test_a_model_that_somebody_lists_has_workers_or_a_reason_and_never_both(listings, routable):
    table = route(listings, routable)
    for name in "abc":
        serving = sorted(url for url in routable if url in listings and name in listings[url].ready)
        listed = any(name in listing.ready or name in listing.missing for listing in listings.values())
        assert list(table.urls(name)) == serving
        assert (table.not_ready(name) is not None) == (listed and not serving)
        assert table.knows(name) == listed
