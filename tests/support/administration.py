"""An administration that notes what it was asked and answers what the test says, behind a real engine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from rsrv.rpc import GrpcioEngine
from rsrv.rpc.access import BearerToken
from rsrv.serve.admin.events import EventLog
from rsrv.serve.admin.requests import (
    Accepted,
    Catalogue,
    CatalogueRow,
    Operation,
    PollAnswer,
    Program,
    ProgramListAnswer,
    ReclaimAnswer,
    RepositoryChange,
    ResidencyAnswer,
    SelectAnswer,
    Shadow,
    StageAnswer,
)
from rsrv.serve.admin.service import AdminService

OPERATION = Operation(
    model="net",
    incarnation=7,
    registration="ready",
    admission="draining",
    accepted=Accepted(queued=3, executing=2, hooks=1),
    parameter_operation="activating",
    pinned=True,
    error="it was full",
    underway=True,
)
SHADOW = Shadow(
    percent=12.5,
    batches=40,
    skipped=3,
    mismatches=2,
    errors=1,
    largest_difference={"y": 0.25, "z": None},
    first_mismatch="y is off",
    first_error="it crashed",
    against=1,
)
PROGRAM = Program(
    id=2, phase="ready", label="fused", fingerprint="abcdef0123456789", diagnostics="all\nwell", created_unix=1e9
)
PROGRAMS = ProgramListAnswer(
    model="net",
    incarnation=7,
    selected=1,
    capacity=4,
    programs=[Program(id=1, phase="ready"), PROGRAM.model_copy(update={"shadow": SHADOW})],
)


class Document(BaseModel):
    """In the place of a status document or a trim's answer, whose rows this module has no use for."""

    server: dict[str, str] = {"name": "rsrv"}
    models: list[dict[str, Any]] = []
    device: dict[str, Any] = {"device": 0, "budget": {"resident_bytes": 1536, "pinned_bytes": 64}}


class Scripted:
    """`answers` by the name of the method; an exception is raised, a function is called with the request."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.gone: Any = None  # what the latest call that waits was given
        operations = (
            "register_model retry_model drain_model undrain_model unregister_model activate_model deactivate_model "
            "pin_model unpin_model wait_model"
        )
        row = CatalogueRow(
            name="net",
            incarnation=7,
            kind="model",
            admission="open",
            inputs=[],
            outputs=[],
            batch_sizes=[1, 8],
            shape_variants=[[]],
            platform="xla_stablehlo",
        )
        self.answers: dict[str, Any] = {
            **dict.fromkeys(operations.split(), OPERATION),
            "get_status": Document(),
            "list_models": Catalogue(models=[row]),
            "set_residency": ResidencyAnswer(model="net", incarnation=7, floor="device"),
            "get_reclaim": ReclaimAnswer(parameter_idle_ms=1.5, workspace_idle_ms=0, host_idle_ms=3),
            "set_reclaim": ReclaimAnswer(parameter_idle_ms=1.5, workspace_idle_ms=0, host_idle_ms=3),
            "stage_program": StageAnswer(model="net", incarnation=7, program=PROGRAM),
            "list_programs": PROGRAMS,
            "select_program": SelectAnswer(model="net", incarnation=7, selected=2, previous=1),
            "remove_program": PROGRAMS,
            "set_shadow": StageAnswer(
                model="net", incarnation=7, program=PROGRAM.model_copy(update={"shadow": SHADOW})
            ),
            "trim_device": Document(),
            "poll_repository": PollAnswer(
                changes=[
                    RepositoryChange(name="net", action="reload", directory="/srv/net"),
                    RepositoryChange.model_validate(
                        {"name": "new", "action": "rename", "directory": "/srv/new", "from": "old"}
                    ),
                ]
            ),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.answers:
            raise AttributeError(name)

        def method(request: Any, *gone: Any) -> Any:
            self.calls.append((name, request))
            self.gone = gone[0] if gone else None
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            return answer(request) if callable(answer) else answer

        return method


class AdminServer:
    """``with AdminServer() as server``; `places` counts the streams that are open."""

    def __init__(self, *, token: str | None = None, capacity: int = 1024, held: int = 4) -> None:
        self.administration = Scripted()
        self.events = EventLog(capacity, clock=lambda: 1.5e9)
        self.places = 0
        self.full: BaseException | None = None
        secret = None if token is None else BearerToken(token)
        administration: Any = self.administration
        self.service = AdminService(administration, self.events, held=held, place=self.place, token=secret)
        self.engine = GrpcioEngine(
            self.service.routes(),
            host="127.0.0.1",
            port=0,
            threads=16,
            max_recv_bytes=1 << 20,
            max_send_bytes=1 << 20,
        )

    @contextmanager
    def place(self, what: str):
        if self.full is not None:
            raise self.full
        self.places += 1
        try:
            yield
        finally:
            self.places -= 1

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return self.administration.calls

    def __enter__(self) -> AdminServer:
        self.url = f"127.0.0.1:{self.engine.bind()}"
        self.engine.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.stop(0.0)
        self.service.close()
