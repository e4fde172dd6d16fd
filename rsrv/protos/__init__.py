"""Message classes of the wire contract, built at import from one descriptor set in a descriptor pool of our own.

The private pool is what lets our package ``inference`` live in one process with tritonclient's, mlserver's or kserve's:
in the default pool the second of them fails with duplicate symbols. Messages are in the modules `inference`, `control`,
`health` and `reflection`; the .proto sources are in protos/ at the top of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.internal import enum_type_wrapper
from google.protobuf.message import Message

__all__ = ["FILES", "POOL", "services"]

POOL: Final = descriptor_pool.DescriptorPool()
"""Holds every descriptor of rsrv, and nothing else."""

FILES: Final[dict[str, bytes]] = {}
"""Serialized ``FileDescriptorProto`` of every .proto file, by its import path; imports stand before their users."""

_SERVICES: Final[list[str]] = []

_KEPT: Final[list[type[Message]]] = []
"""Classes of nested messages. upb makes such a class when it is first needed and holds it weakly: without this the
garbage collector takes it between two requests, and a thread that asks for it meanwhile gets what is being freed."""


def _load(descriptor_set: Path) -> None:
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set.read_bytes()).file:
        FILES[file.name] = file.SerializeToString()
        POOL.AddSerializedFile(FILES[file.name])
        _SERVICES.extend(f"{file.package}.{service.name}" for service in file.service)


_load(Path(__file__).with_name("rsrv.binpb"))


def services() -> dict[str, ServiceDescriptor]:
    """Every declared service by its full name (``inference.GRPCInferenceService``)."""
    return {name: POOL.FindServiceByName(name) for name in _SERVICES}


def symbols(*files: str) -> dict[str, Any]:
    """The public names of `files` as generated code would have them: message classes, enums, values of enums."""
    names: dict[str, Any] = {}
    for file in files:
        descriptor = POOL.FindFileByName(file)
        for name, message in descriptor.message_types_by_name.items():
            names[name] = message_factory.GetMessageClass(message)
            _keep_nested(message)
        for name, enum in descriptor.enum_types_by_name.items():
            names[name] = enum_type_wrapper.EnumTypeWrapper(enum)
            names.update((value.name, value.number) for value in enum.values)
    return names


def _keep_nested(message: Descriptor) -> None:
    for nested in message.nested_types:
        _KEPT.append(message_factory.GetMessageClass(nested))
        _keep_nested(nested)
