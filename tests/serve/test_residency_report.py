"""What a server says about its budget for weights, when it has one."""

import logging

from residency_support import NBYTES

from rsrv.serve.residency.floors import Floor


def reported(here, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, "rsrv.serve.residency.report"):
        here.residency.report_budget()
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_budget_is_logged_with_what_it_was_worked_out_from(site, caplog):
    here = site(10)
    here.add("p", floor=Floor.DEVICE, scratch=NBYTES)
    here.add("a")
    assert reported(here, caplog) == [
        (
            "INFO",
            f"weight budget resolved arena={10 * NBYTES} scratch={NBYTES} pool={9 * NBYTES} pinned={NBYTES} "
            f"budget={8 * NBYTES} eviction=lru",
        )
    ]


def test_no_budget_for_models_that_come_and_go_is_a_warning(site, caplog):
    here = site(1)
    here.add("p", floor=Floor.DEVICE)
    here.add("a", "b")
    (level, text), _ = reported(here, caplog)
    assert level == "WARNING"
    assert text == "no budget for weights that come and go: 2 models load for every dispatch"


def test_pinning_more_than_the_pool_is_a_warning(site, caplog):
    here = site(1)
    here.add("p", floor=Floor.DEVICE, scratch=NBYTES // 2)
    (level, text), _ = reported(here, caplog)
    assert level == "WARNING"
    assert text.startswith(f"pinned weights exceed the pool pinned={NBYTES} pool={NBYTES // 2} arena={NBYTES}")


def test_a_floor_that_was_changed_is_followed_by_the_budget(site, caplog):
    here = site(4)
    here.add("a")
    with caplog.at_level(logging.INFO, "rsrv.serve.residency.report"):
        here.residency.set_floor("a", Floor.DEVICE)
    assert f"pinned={NBYTES} budget={3 * NBYTES}" in caplog.text
