"""The state file: what operators changed is there again after a restart, and a damaged file says so."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.packing_fleet import knobs

from rsrv.core.errors import ConfigError
from rsrv.gateway.admin import state
from rsrv.gateway.admin.state import StateFile
from rsrv.gateway.scheduling.knobs import ModelOverride
from rsrv.gateway.workers.fleet import Endpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.json"


def test_without_a_file_all_is_as_configured(path: Path) -> None:
    file, configured = StateFile(path), knobs(hysteresis=0.1)
    assert file.restore(configured) is configured
    assert (file.added, file.drained) == ((), ())
    assert not path.exists()


def test_changed_knobs_are_there_again(path: Path) -> None:
    configured = knobs(models={"m": {"replicas": 2}, "n": {"replicas": 3}})
    changed = configured.changed(hysteresis=0.25, default_replicas="all")
    changed = changed.with_override("m", ModelOverride(fill_mode="spread", fill_factor=0.5))
    changed = changed.with_override("n", ModelOverride()).with_override("unknown", ModelOverride(replicas="all"))
    assert StateFile(path).save_knobs(changed, configured)
    restored = StateFile(path).restore(configured)
    assert restored.policy() == changed.policy()
    assert restored.models == changed.models
    assert restored.generation > 0


def test_only_what_differs_is_kept_so_that_the_configuration_may_change_beneath(path: Path) -> None:
    configured = knobs(hysteresis=0.1, compaction_interval=3)
    StateFile(path).save_knobs(configured.changed(hysteresis=0.2), configured)
    assert json.loads(path.read_text()) == {"version": 1, "policy": {"hysteresis": 0.2}}
    assert StateFile(path).restore(knobs(hysteresis=0.3, compaction_interval=7)).compaction_interval == 7
    file = StateFile(path)
    file.save_knobs(file.restore(configured).changed(hysteresis=0.1), configured)
    assert json.loads(path.read_text()) == {"version": 1}


def test_workers_are_there_again(path: Path) -> None:
    added = [
        Endpoint("10.0.0.5:8080", "a0", "10.0.0.5:9100", "control"),
        Endpoint("10.0.0.6:8080", "10.0.0.6:8080", None, "control"),
    ]
    file = StateFile(path)
    assert file.save_workers(added, ["10.0.0.7:8080", "10.0.0.5:8080"])
    configured = knobs()
    assert file.save_knobs(configured.changed(hysteresis=0.5), configured)
    again = StateFile(path)
    assert again.added == tuple(added)
    assert again.drained == ("10.0.0.5:8080", "10.0.0.7:8080")
    assert again.restore(configured).hysteresis == 0.5


def test_the_newest_change_stays_whatever_order_they_are_written_in(path: Path) -> None:
    configured, file = knobs(), StateFile(path)
    first = configured.changed(hysteresis=0.1)
    second = first.changed(hysteresis=0.2)
    assert file.save_knobs(second, configured)
    assert file.save_knobs(first, configured)
    assert StateFile(path).restore(configured).hysteresis == 0.2


def test_the_file_is_nobody_elses_and_replaced_as_a_whole(path: Path) -> None:
    configured = knobs()
    for step in (0.1, 0.2):
        before = path.stat().st_ino if path.exists() else None
        StateFile(path).save_knobs(configured.changed(hysteresis=step), configured)
        assert path.stat().st_ino != before
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_write_that_fails_is_told_and_leaves_what_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configured, file = knobs(), StateFile(path)
    assert file.save_knobs(configured.changed(hysteresis=0.1), configured)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, "fsync", full)
    changed = configured.changed(hysteresis=0.2).changed(hysteresis=0.3)
    assert not file.save_knobs(changed, configured)
    assert "No space left" in caplog.text
    assert str(path) in caplog.text
    assert os.listdir(path.parent) == [path.name]
    assert StateFile(path).restore(configured).hysteresis == 0.1
    monkeypatch.undo()
    assert file.save_knobs(changed, configured)
    assert StateFile(path).restore(configured).hysteresis == 0.3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is not JSON"),
        ('{"version": 1, "pol', "is not JSON"),
        ("\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no version"),
        ("{}", "has no version"),
        ('{"version": true}', "has no version"),
        ('{"version": "1"}', "has no version"),
        ('{"version": 2}', "was written in version 2"),
        ('{"version": 1, "polcy": {}}', "polcy"),
        ('{"version": 1, "policy": []}', "policy"),
        ('{"version": 1, "models": {"m": {"replicas": 0}}}', "models.m.replicas"),
        ('{"version": 1, "models": {"m": {"x": 0}}}', "models.m.x"),
        ('{"version": 1, "added": [{"worker": "here"}]}', "added.0.worker"),
        ('{"version": 1, "drained": [7]}', "drained.0"),
    ],
    ids=lambda value: value[:30],
)
def test_a_damaged_file_is_an_error_that_names_it(path: Path, content: str, text: str) -> None:
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="state_file") as caught:
        StateFile(path)
    assert str(path) in caught.value.message
    assert text in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 78
    assert path.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize("policy", [{"hysteresis": 1.5}, {"hysterese": 0.5}, {"mode": "round_robin"}])
def test_a_value_that_is_not_accepted_any_more_is_an_error_that_names_the_file(path: Path, policy: Any) -> None:
    path.write_text(json.dumps({"version": 1, "policy": policy}))
    file = StateFile(path)
    with pytest.raises(ConfigError, match=next(iter(policy))) as caught:
        file.restore(knobs())
    assert str(path) in caught.value.message


def test_a_directory_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not an existing directory"):
        StateFile(tmp_path / "nowhere" / "state.json")


def test_a_directory_in_place_of_the_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        StateFile(tmp_path)


def test_a_file_of_absurd_size_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_BYTES", 10)
    path.write_text('{"version": 1, "policy": {}}')
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        StateFile(path)


def test_a_pipe_in_place_of_the_file_is_an_error_at_the_start(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no plain file"):
        StateFile(path)


def test_one_gateway_has_the_file_and_the_next_one_when_it_is_done(path: Path) -> None:
    first, second = StateFile(path), StateFile(path)
    first.own()
    try:
        with pytest.raises(ConfigError, match="another gateway uses it") as caught:
            second.own()
        assert str(path) in caught.value.message
        assert caught.value.exit_code == 78
    finally:
        first.disown()
    second.own()
    second.disown()
    second.disown()


def test_what_a_killed_gateway_left_half_written_is_removed_and_nothing_else(path: Path) -> None:
    configured, file = knobs(), StateFile(path)
    assert file.save_knobs(configured.changed(hysteresis=0.1), configured)
    left, others = path.with_name(f".{path.name}.abcd.partial"), path.with_name(".other.json.abcd.partial")
    left.write_text('{"version": 1, "pol')
    others.write_text("")
    file.own()
    file.disown()
    assert (left.exists(), others.exists()) == (False, True)
    assert StateFile(path).restore(configured).hysteresis == 0.1


def test_where_nothing_can_be_written_the_start_says_so_and_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(path)

    def refused(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(state.os, "open", refused)
    file.own()
    monkeypatch.undo()
    assert "cannot be written: Read-only file system" in caplog.text
    file.disown()
