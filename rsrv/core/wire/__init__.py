"""The KServe V2 messages ModelInferRequest and ModelInferResponse, between bytes and numpy arrays."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DecodedRequest": ".request",
        "IndexRow": ".metadata",
        "InputHeader": ".headers",
        "OutputHeader": ".headers",
        "RequestMessage": ".request",
        "RequestedOutput": ".headers",
        "ResponseMessage": ".response",
        "ShmInput": ".encode",
        "TIMEOUT_NS_PARAM": ".parameters",
        "deadline_params": ".parameters",
        "decode_request": ".request",
        "decode_response": ".response",
        "encode_index": ".metadata",
        "encode_metadata": ".metadata",
        "encode_request": ".encode",
        "encode_response": ".encode",
        "join": ".encode",
        "parse_request": ".request",
    },
)
