"""A new version takes the place of the old one, or a model another name, while requests for it go on."""

import numpy as np
import pytest
from residency_support import LONG, NBYTES, Gate, Version, affine, in_background

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import DeviceOutOfMemory, NameTaken, UnknownModel
from rsrv.serve.residency.digests import Verifier
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.ledger import Ledger
from rsrv.serve.residency.tensors import open_weights


def written(path, values):
    write_weights(path, [("w", values)])
    return path


def there(here, name):
    return here.residency.model(name).device_resident


def lru(here):
    return [model.name for model in here.residency.snapshot().lru]


# --- exchange ---------------------------------------------------------------------------------------------------------


def test_the_next_version_answers_and_comes_at_once_where_the_old_one_was(either):
    here = either()
    here.add("a", "b")
    here.serve("a", "b")
    new = Version(here, "a")
    assert not there(here, new.own)
    new.exchange()
    while not there(here, "a"):
        here.settle()
    assert there(here, new.aside)
    assert (new.weights.name, new.old.weights.name) == ("a", new.aside)
    here.serve("a", "b")
    new.retire()
    assert here.residency.model(new.aside) is None
    assert here.residency.model(new.own) is None
    here.is_consistent()
    assert here.device.weight_bytes == 2 * NBYTES


def test_a_version_whose_old_one_was_cold_stays_cold(either):
    here = either()
    here.add("a")
    new = Version(here, "a")
    new.swap()
    here.settle()
    assert here.device.transfers == []
    here.serve("a")
    here.is_consistent()


def test_what_was_queued_runs_on_the_old_weights_and_those_are_not_freed_before(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    first, second = here.ask("a", 1), here.ask("a", 2)
    running.wait_entered()
    new = Version(here, "a")
    new.exchange()
    third = here.ask("a", 3)
    retired = in_background(new.retire)
    here.settle()
    assert new.old.weights.buffers, "freed under a running execution"
    running.open(10)
    here.is_answered(first, second, third)
    retired()
    assert new.old.weights.buffers == ()
    here.is_consistent()


def test_old_weights_that_a_batch_uses_are_evicted_for_the_next_version_only_when_it_ended(either):
    here = either(1)
    running = Gate(affine)
    here.add("a", fn=running)
    first = here.ask("a", 1)
    running.wait_entered()
    new = Version(here, "a")
    new.exchange()
    here.settle()
    assert new.old.weights.buffers
    assert here.residency.model(new.aside).releasing
    assert here.residency.releasing_bytes == NBYTES
    running.open()
    here.is_answered(first)
    while not there(here, "a"):
        here.settle()
    assert here.residency.releasing_bytes == 0
    assert not there(here, new.aside)
    new.retire()
    here.serve("a")
    here.is_consistent()
    assert here.device.most_weight_bytes == NBYTES


def test_pin_use_and_place_in_the_order_go_to_the_next_version_and_the_old_one_leaves_first(either):
    here = either(4)
    here.add("a", "b", "c")
    here.serve("a", "a", "b", "c")
    here.residency.pin("a")
    before = here.residency.snapshot().models["a"]
    new = Version(here, "a")
    here.residency.activate(new.own)
    assert lru(here) == ["a", "b", "c", new.own]
    new.exchange()
    assert lru(here) == [new.aside, "a", "b", "c"]
    seen = here.residency.snapshot().models
    assert (seen["a"].pinned, seen[new.aside].pinned) == (True, False)
    assert here.residency.model("a").pinned
    assert not here.residency.model(new.aside).pinned
    assert (seen["a"].loads, seen[new.aside].loads) == (before.loads + 1, 0)
    assert seen["a"].requests_per_second == before.requests_per_second > 0 == seen[new.aside].requests_per_second
    here.add("d")
    here.serve("d")
    assert not there(here, new.aside)
    assert here.resident == "abcd"
    new.retire()
    here.is_consistent()


def test_a_version_that_is_pinned_to_the_device_is_there_before_the_exchange(either):
    here = either(3)
    here.add("a", floor=Floor.DEVICE)
    new = Version(here, "a", floor=Floor.DEVICE)
    assert there(here, new.own)
    assert there(here, "a")
    new.swap()
    here.serve("a")
    here.is_consistent()
    assert here.residency.snapshot().pinned_bytes == NBYTES


def test_a_version_that_does_not_fit_leaves_the_old_one_alone(either):
    here = either(1)
    here.add("a", floor=Floor.DEVICE)
    with pytest.raises(DeviceOutOfMemory):
        Version(here, "a", floor=Floor.DEVICE)
    assert set(here.residency.snapshot().models) == {"a"}
    here.serve("a")
    here.is_consistent()


def test_where_weights_stay_for_good_versions_change_places_too(tmp_path):
    from rsrv.runtime.fake import FakeDevice
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.tensors import TensorPool
    from rsrv.serve.scheduler import Scheduler

    device = FakeDevice()
    pool = TensorPool(device)
    residency = Residency(device, Scheduler(device), None, pool)
    old, new = (
        residency.open(
            name, open_weights(written(tmp_path / name, np.ones(4, np.float32))), floor=None, scratch_bytes=0
        )
        for name in ("a", "b")
    )
    residency.pin("a")
    residency.exchange(old, new, "a#1")
    assert (residency.model("a").pinned, residency.model("a#1").pinned) == (True, False)
    residency.close_model(old)
    assert residency.model("a#1") is None
    residency.rename(new, "c", floor=None)
    assert residency.model("c").device_resident
    assert residency.model("a") is None
    residency.free()
    assert pool.resident_bytes == 0


def test_in_explicit_mode_requests_wait_for_the_next_version_of_what_an_operator_brought(site):
    here = site(mode="externally_managed")
    here.add("a", "b")
    here.residency.activate("a")
    here.serve("a")
    new = Version(here, "a")
    with here.device.held_transfers() as gate:
        other = in_background(here.residency.activate, "b")
        gate.wait_entered()
        new.exchange()
        reply = here.ask("a", 5)
        here.settle()
        assert not reply._results, "its turn is still to come"
    other()
    here.is_answered(reply)
    new.retire()
    here.is_consistent()


@pytest.mark.parametrize("which", ["old", "new"])
def test_weights_that_were_closed_cannot_be_exchanged(either, which):
    here = either()
    here.add("a")
    new = Version(here, "a")
    here.residency.close_model(new.weights)
    pair = (new.weights, new.old.weights) if which == "old" else (new.old.weights, new.weights)
    with pytest.raises(UnknownModel, match="'a'"):
        here.residency.exchange(*pair, "aside")
    here.serve("a")
    here.is_consistent()


def test_an_exchange_or_a_rename_to_a_name_that_is_taken_changes_nothing(either):
    here = either()
    here.add("a", "b")
    here.serve("a", "b")
    new = Version(here, "a")
    with pytest.raises(NameTaken, match="'b'"):
        here.residency.exchange(new.old.weights, new.weights, "b")
    with pytest.raises(NameTaken, match="'b'"):
        here.residency.rename(new.old.weights, "b", floor=None)
    assert set(here.residency.snapshot().models) == {"a", "b", new.own}
    new.swap()
    here.serve("a", "b")
    here.is_consistent()


def test_a_next_version_that_cannot_come_is_a_warning_and_requests_are_told(either, caplog):
    here = either()
    here.add("a")
    here.serve("a")
    new = Version(here, "a")
    new.path.write_bytes(new.path.read_bytes()[:-8])
    new.exchange()
    assert not here.ask("a", 1).wait().outputs
    here.settle()
    assert "weights of the next version are not on the device model=a" in caplog.text
    new.retire()
    here.settle()
    assert here.device.weight_bytes == 0
    here.is_consistent()


def test_many_reloads_under_requests_lose_none_and_leave_nothing(either):
    here = either(2.5)
    here.add("a", "b")
    replies = []
    for round_ in range(40):
        replies += [here.ask("a", round_, 1), here.ask("b", round_)]
        new = Version(here, "a", seed=round_)
        new.exchange()
        replies += [here.ask("a", 2), here.ask("b", 3)]
        new.retire()
        new.path.unlink()
    here.is_answered(*replies)
    here.is_consistent()
    assert set(here.residency.snapshot().models) == {"a", "b"}
    assert len(here.residency._moves._expected) == 0
    assert here.device.most_weight_bytes <= 2.5 * NBYTES


def test_the_budget_that_one_would_need_is_learned_across_versions():
    def learned(reload):
        ledger = Ledger(arena=1000, unified=True)
        for name, nbytes in (("a", 100), ("b", 30), ("c", 7)):
            ledger.add(name, nbytes, floor=Floor.UNPINNED)
        for turn in range(12):
            for name in "abac" if turn % 3 else "cb":
                ledger.touch(name, turn)
            if reload and turn % 2:
                ledger.add("a#new", 100, floor=Floor.UNPINNED)
                ledger.exchange("a", "a#new", "a#old")
                ledger.remove("a#old")
        return [ledger._ghosts.bytes_for(share) for share in (0.2, 0.5, 0.8, 0.99)]

    assert learned(True) == learned(False)
    assert {*learned(True)} == {130, 137}, "a and b, or all three"


# --- rename -----------------------------------------------------------------------------------------------------------


def test_a_renamed_model_keeps_its_weights_its_place_and_its_requests(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    here.serve("b")
    reply = here.ask("a", 1)
    running.wait_entered()
    m = here.models.pop("a")
    transfers = len(here.device.transfers)
    floor = m.weights.floor
    here.residency.rename(m.weights, "z", floor=None)
    running.open(10)
    here.is_answered(reply)
    assert here.residency.model("a") is None
    assert here.residency.model("z").floor is floor
    assert (m.weights.name, m.weights.model) == ("z", "z")
    assert lru(here) == ["b", "z"]
    here.models["z"], here.values["z"] = m, here.values["a"]
    here.is_consistent()
    assert len(here.device.transfers) == transfers
    here.scheduler.remove("a", timeout=LONG)
    here.residency.close_model(m.weights)
    del here.models["z"]
    assert here.device.weight_bytes == NBYTES
    here.is_consistent()


def test_a_renamed_model_gets_the_floor_of_its_new_name(either):
    here = either()
    m = here.add("a")
    here.residency.rename(m.weights, "z", floor=Floor.DEVICE)
    assert here.residency.model("z").floor is Floor.DEVICE
    assert here.residency.snapshot().pinned_bytes == NBYTES
    here.residency.rename(m.weights, "y", floor=Floor.UNPINNED)
    assert here.residency.snapshot().pinned_bytes == 0


def test_a_floor_that_a_new_name_cannot_have_is_a_warning(either, caplog):
    here = either(1)
    here.add("p", floor=Floor.DEVICE)
    m = here.add("a", floor=Floor.UNPINNED)
    here.residency.rename(m.weights, "z", floor=Floor.DEVICE)
    assert here.residency.model("z").floor is Floor.UNPINNED
    assert "floor of a renamed model stays model=z floor=unpinned wanted=device" in caplog.text
    here.models["z"] = here.models.pop("a")
    here.is_consistent()


def test_closed_weights_cannot_be_renamed(either):
    here = either()
    m = here.add("a")
    here.remove("a")
    with pytest.raises(UnknownModel):
        here.residency.rename(m.weights, "z", floor=None)


def test_a_store_is_told_the_name_of_the_model_and_not_that_of_the_version(site):
    here = site(unified=False)
    here.add("a")
    asked = []
    store = here.residency._copies._store
    acquire = store.acquire
    store.acquire = lambda name, file, fill: asked.append(name) or acquire(name, file, fill)
    new = Version(here, "a")
    new.swap()
    assert asked == ["a"]
    here.serve("a")


# --- the verifier -----------------------------------------------------------------------------------------------------


def test_a_verifier_follows_names(tmp_path):
    told = []
    verifier = Verifier(told.append)
    tensor = np.arange(64 << 10, dtype=np.float32)
    for name in ("a", "b"):
        written(tmp_path / name, tensor)
    files = {name: open_weights(tmp_path / name, clock=lambda: 1 << 62) for name in ("a", "b")}
    verifier.add("a", files["a"])
    verifier.rename("a", "a#1")
    verifier.add("b", files["b"])
    verifier.rename("b", "a")
    verifier.rename("nobody", "c")
    while verifier._due:
        verifier.verify_next()
    assert sorted(told) == ["a", "a#1"]
    assert {*verifier._models} == {"a", "a#1"}
    verifier.remove("a#1")
    verifier.remove("a")
    assert not verifier._declaring
    for file in files.values():
        file.close()
