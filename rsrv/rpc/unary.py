"""Handlers of methods that take one protobuf message and answer with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from rsrv.core.errors import InvalidRequest
from rsrv.rpc.call import Call, reply


def unary(request_class: Any, method: Callable[[Any], Any]) -> Callable[[Call], None]:
    """The handler of a method that takes one message, answers with one, and waits for nothing."""
    return lambda call: reply(call, method(parse(call, request_class)))


def parse(call: Call, request_class: Any) -> Any:
    """The request of a unary call. Raises InvalidRequest for a body that is no such message."""
    try:
        return request_class.FromString(call.body)
    except DecodeError:
        raise InvalidRequest(f"the body of {call.path} is no {request_class.DESCRIPTOR.full_name}") from None
