"""Server reflection, v1 and v1alpha: the .proto files behind our services, for grpcurl and the like."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from rsrv.core.errors import Code, InvalidRequest
from rsrv.protos import FILES, POOL, reflection, reflection_v1alpha
from rsrv.rpc.call import Call
from rsrv.rpc.routes import Route, Routes

_VERSIONS = {
    "grpc.reflection.v1.ServerReflection": reflection,
    "grpc.reflection.v1alpha.ServerReflection": reflection_v1alpha,
}


def reflection_routes(services: Iterable[str]) -> Routes:
    """Routes that describe `services` (full names), the two of reflection included.

    Only descriptors of our private pool are told. A stream holds a thread of the grpcio engine while it is open.
    """
    names = sorted({*services, *_VERSIONS})
    return {
        f"/{service}/ServerReflectionInfo": Route(_Reflection(names, messages).handle, "bidi")
        for service, messages in _VERSIONS.items()
    }


class _Reflection:
    def __init__(self, services: list[str], messages: ModuleType) -> None:
        self._services = services
        self._messages: Any = messages

    def handle(self, call: Call) -> None:
        def on_message(body: bytes | None) -> None:
            if body is None:
                call.finish()
            else:
                call.send([self.answer(body).SerializeToString()])

        call.on_message(on_message)

    def answer(self, body: bytes) -> Any:
        try:
            request = self._messages.ServerReflectionRequest.FromString(body)
        except DecodeError:
            raise InvalidRequest("the message is no ServerReflectionRequest") from None
        response = self._messages.ServerReflectionResponse(valid_host=request.host, original_request=request)
        self._fill(response, request)
        return response

    def _fill(self, response: Any, request: Any) -> None:
        wanted = request.WhichOneof("message_request")
        if wanted == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        elif wanted == "file_by_filename":
            self._files(response, request.file_by_filename, f"file {request.file_by_filename!r}")
        elif wanted == "file_containing_symbol":
            symbol = request.file_containing_symbol
            self._files(response, _file_of_symbol(symbol), f"symbol {symbol!r}")
        elif wanted == "file_containing_extension":
            extension = request.file_containing_extension
            what = f"extension {extension.extension_number} of {extension.containing_type!r}"
            self._files(response, None, what)
        elif wanted == "all_extension_numbers_of_type":
            self._extensions(response, request.all_extension_numbers_of_type)
        else:
            _refuse(response, Code.INVALID_ARGUMENT, "the request asks for nothing")

    def _files(self, response: Any, name: str | None, what: str) -> None:
        if name is None or name not in FILES:
            _refuse(response, Code.NOT_FOUND, f"{what} is not known")
        else:
            response.file_descriptor_response.file_descriptor_proto.extend(FILES[file] for file in _with_imports(name))

    def _extensions(self, response: Any, name: str) -> None:
        try:
            POOL.FindMessageTypeByName(name)
        except KeyError:
            _refuse(response, Code.NOT_FOUND, f"type {name!r} is not known")
        else:
            response.all_extension_numbers_response.base_type_name = name  # proto3: it has none


def _file_of_symbol(symbol: str) -> str | None:
    try:
        return str(POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        pass
    parent, _, name = symbol.rpartition(".")
    try:  # the pool does not find methods by themselves
        service = POOL.FindServiceByName(parent)
    except KeyError:
        return None
    return str(service.file.name) if name in service.methods_by_name else None


def _with_imports(name: str) -> list[str]:
    """The file and all that it imports, itself first."""
    found = [name]
    for file in found:
        for imported in descriptor_pb2.FileDescriptorProto.FromString(FILES[file]).dependency:
            if imported not in found:
                found.append(imported)
    return found


def _refuse(response: Any, code: Code, text: str) -> None:
    response.error_response.error_code = int(code)
    response.error_response.error_message = text
