"""JSON Schema of the node file, of a worker's block in it, and of the gateway's file: for editors and `rsrv config`."""

from __future__ import annotations

from typing import Any

from rsrv.core.config.gateway import GatewayConfig
from rsrv.core.config.node import NodeFile, WorkerEntry
from rsrv.core.config.sections import Section, ServerConfig

_FREE_KEYS = {"^x-": True}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of the node file; ``$defs/WorkerBlock`` is the schema of `global` and of what a worker overrides."""
    definitions: dict[str, Any] = {}
    root = _schema(NodeFile, definitions)
    block = _schema(ServerConfig, definitions)
    entry = _schema(WorkerEntry, definitions)
    del block["required"]  # model_dirs comes from model_repo
    definitions["WorkerBlock"] = {**block, "title": "WorkerBlock", "description": "Configuration of a worker."}
    definitions["WorkerEntry"] = {
        **entry,
        "description": "A worker of the node.",
        "properties": {**block["properties"], **entry["properties"]},
    }
    root["properties"]["global"] = {
        "$ref": "#/$defs/WorkerBlock",
        "description": root["properties"]["global"]["description"],
    }
    return {
        "$schema": _DIALECT,
        **root,
        "title": "rsrv node file",
        "$defs": dict(sorted(definitions.items())),
    }


def gateway_schema() -> dict[str, Any]:
    """The schema of the gateway's file."""
    definitions: dict[str, Any] = {}
    root = _schema(GatewayConfig, definitions)
    return {"$schema": _DIALECT, **root, "title": "rsrv gateway file", "$defs": dict(sorted(definitions.items()))}


def _schema(model: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one model; those that it refers to go to `definitions`, and ``x-`` keys are free in each."""
    schema = model.model_json_schema()
    for name, definition in schema.pop("$defs", {}).items():
        definitions[name] = {**definition, "patternProperties": _FREE_KEYS}
    schema["patternProperties"] = _FREE_KEYS
    return schema
