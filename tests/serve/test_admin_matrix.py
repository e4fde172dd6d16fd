"""Every cell of the table of states and operations, over HTTP (spec worker 11.5.1)."""

import pytest
from admin_support import Site

from rsrv.serve.admin.matrix import MATRIX
from rsrv.serve.registry import ModelState

STATES = ["registered", "preparing", "ready", "failed", "retiring", "release_failed"]

# Written down from the specification: status, then the reason of a refusal or "".
CELLS = {
    "register": [(409, "name_taken")] * 6,
    "drain": [(200, ""), (200, ""), (200, ""), (200, ""), (409, "removing"), (409, "removing")],
    "undrain": [(200, ""), (200, ""), (200, ""), (409, "failed"), (409, "removing"), (409, "removing")],
    "activate": [(202, ""), (202, ""), (202, ""), (409, "failed"), (409, "removing"), (409, "removing")],
    "deactivate": [
        (202, ""),
        (409, "operation_pending"),
        (202, ""),
        (409, "failed"),
        (409, "removing"),
        (409, "removing"),
    ],
    "pin": [(200, ""), (200, ""), (200, ""), (409, "failed"), (409, "removing"), (409, "removing")],
    "unpin": [(200, ""), (200, ""), (200, ""), (409, "failed"), (409, "removing"), (409, "removing")],
    "programs": [
        (409, "not_ready"),
        (409, "not_ready"),
        (200, ""),
        (409, "failed"),
        (409, "removing"),
        (409, "removing"),
    ],
    "programs/select": [
        (409, "not_ready"),
        (409, "not_ready"),
        (200, ""),
        (409, "failed"),
        (409, "removing"),
        (409, "removing"),
    ],
    "programs/remove": [
        (409, "not_ready"),
        (409, "not_ready"),
        (200, ""),
        (409, "failed"),
        (409, "removing"),
        (409, "removing"),
    ],
    "retry": [(409, "not_failed"), (409, "not_failed"), (409, "not_failed"), (202, ""), (409, "removing"), (202, "")],
    "unregister": [(202, "")] * 6,
}
AFTER = {
    ("undrain", "registered"): "preparing",
    ("activate", "registered"): "preparing",
    ("retry", "failed"): "preparing",
    ("retry", "release_failed"): "retiring",
    ("unregister", "ready"): "retiring",
}
GONE = {("unregister", "registered"), ("unregister", "preparing"), ("unregister", "failed")}


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("operation", CELLS)
def test_a_cell_of_the_table(site, operation, state):
    site.put("net", state, "drained")
    directory = site.bundle("net")
    more = {
        "register": {"directory": str(directory)},
        "programs": {"base_directory": str(directory)},
        "programs/select": {"program": 1, "expected": 1},
        "programs/remove": {"program": 2},
    }.get(operation, {})
    wanted, reason = CELLS[operation][STATES.index(state)]
    status, body = site.post(f"models/{operation}", model="net", **more)
    assert (status, body["error"]["reason"] if status >= 400 else "") == (wanted, reason), body
    assert body["model"] == "net"
    assert body["incarnation"] == 1
    after = site.registry.get("net")
    if (operation, state) in GONE:
        assert after is None
    elif status >= 400:
        assert after.state.value == state
    else:
        assert after.state.value == AFTER.get((operation, state), state)


def test_drain_of_a_failed_model_does_nothing(site):
    site.put("net", "failed", "open")
    status, body = site.post("models/drain", model="net")
    assert (status, body["admission"], body["registration"]) == (200, "open", "failed")
    assert body["error"] == "compile: bad op"
    assert site.registrations.calls == []


def test_deactivating_a_model_that_is_only_registered_does_nothing(site):
    site.put("net", "registered", "drained")
    assert site.post("models/deactivate", model="net")[0] == 202
    assert site.residency.calls == []


def test_the_table_has_a_cell_for_each_state():
    assert all(set(row) == set(ModelState) for row in MATRIX.values())
