"""Who may not be kept waiting by weights: the urgent, the operator, and models whose neighbours are broken."""

import logging
import os

from residency_support import NBYTES, Gate, affine, in_background

from rsrv.core.errors import WeightsUnavailable
from rsrv.serve.scheduler.policy import Policy

SECOND = 10**9
EDF = Policy(discipline="edf")


def saturated(here):
    """ "b" has urgent requests for long, the first one running; "f" was loaded meanwhile for one that is not urgent.

    Returns the gate of "b", and all replies.
    """
    running = Gate(affine)
    here.add("b", fn=running, keys=(1,), nbytes=NBYTES // 4)
    here.add("f", "n")
    warm = here.ask("b")
    running.open()
    here.is_answered(warm)
    with here.device.held_transfers() as transfer:
        replies = [here.ask("f", deadline_ns=here.clock.ns + 300 * SECOND)]
        transfer.wait_entered()
        replies += [here.ask("b", value, deadline_ns=here.clock.ns + 60 * SECOND) for value in range(30)]
        running.wait_entered()
    while not here.residency.model("f").device_resident:
        here.settle()
    return running, replies


def test_weights_that_are_not_used_do_not_keep_out_a_more_urgent_model(site):
    here = site(1.5, policy=EDF)
    running, replies = saturated(here)
    replies.append(here.ask("n", deadline_ns=here.clock.ns + 5 * SECOND))
    running.open(1000)
    here.is_answered(*replies)
    launched = here.device.launched
    assert launched.index("f") < launched.index("n") < 10
    assert launched[-1] == "b"
    here.is_consistent()


def test_weights_that_are_not_used_do_not_keep_an_operator_waiting(site):
    here = site(1.5, policy=EDF)
    running, replies = saturated(here)
    compacted = in_background(here.residency.compact)
    while not here.residency._moves._orders:
        here.settle()
    running.open(1000)
    compacted()
    here.is_answered(*replies)
    launched = here.device.launched
    assert launched.index("f") < 10
    assert launched[-1] == "b"


def test_of_models_that_wait_for_weights_the_most_urgent_comes_first_under_edf(site):
    here = site(3, policy=EDF)
    running = Gate(affine)
    here.add("p", fn=running)
    here.add("a", "b", "c")
    first = here.ask("p")
    running.wait_entered()
    with here.device.held_transfers() as transfer:
        replies = [here.ask("a", deadline_ns=here.clock.ns + 90 * SECOND)]
        transfer.wait_entered()
        replies.append(here.ask("b", deadline_ns=here.clock.ns + 80 * SECOND))
        here.settle()
        replies.append(here.ask("c", deadline_ns=here.clock.ns + 70 * SECOND))
        here.settle()
    running.open()
    here.is_answered(first, *replies)
    launched = here.device.launched
    assert launched.index("c") < launched.index("b")


def test_nobody_leaves_again_for_weights_that_are_known_to_be_broken(site, caplog):
    here = site(1)
    here.add("g", "x")
    here.serve("x", "g")
    content = here.path("x").read_bytes()
    os.truncate(here.path("x"), 100)
    with caplog.at_level(logging.WARNING, "rsrv.serve.residency.moves"):
        for _ in range(5):
            assert isinstance(here.ask("x").error(), WeightsUnavailable)
            here.serve("g")
    loads, evictions = here.counted
    assert (loads, evictions) == (3, 2), "one eviction, and one load to undo it, for the first of the five"
    assert len([r for r in caplog.records if "weights could not be loaded model=x" in r.getMessage()]) == 1
    here.path("x").write_bytes(content)
    # The declared digests prove that it is the same again.
    here.serve("x", "g")
    here.is_consistent()
