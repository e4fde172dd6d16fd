"""Run by the interpreter of the tritonclient 2.50.0 environment: ``python tritonclient_250_calls.py HOST:PORT``.

Sends pairs inline, through system shared memory both ways, and mixed; prints one JSON object with what it did.
"""

import json
import os
import sys
from importlib.metadata import version

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm


def tensor(name, array):
    result = triton.InferInput(name, list(array.shape), "FP32")
    result.set_data_from_numpy(array)
    return result


def same(found, expected):
    return bool(
        found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()
    )


def main():
    client = triton.InferenceServerClient(sys.argv[1])
    rng = np.random.default_rng(20)
    rows = 3
    a, b = (rng.standard_normal((rows, 16)).astype(np.float32) for _ in range(2))
    n = a.nbytes
    report = {"version": version("tritonclient"), "ready": client.is_server_ready()}

    answer = client.infer("pair", [tensor("a", a), tensor("b", b)])
    report["inline"] = same(answer.as_numpy("sum"), a + b) and same(answer.as_numpy("difference"), a - b)

    name = f"test-contract-{os.getpid()}"
    handle = shm.create_shared_memory_region(name, "/" + name, 4 * n)
    try:
        shm.set_shared_memory_region(handle, [a, b])
        client.register_system_shared_memory(name, "/" + name, 4 * n)
        inputs = [tensor("a", a), tensor("b", b)]
        outputs = [triton.InferRequestedOutput("sum"), triton.InferRequestedOutput("difference")]
        for position in range(2):
            inputs[position].set_shared_memory(name, n, offset=position * n)
            outputs[position].set_shared_memory(name, n, offset=(2 + position) * n)
        client.infer("pair", inputs, outputs=outputs)
        found = [shm.get_contents_as_numpy(handle, np.float32, [rows, 16], offset=(2 + i) * n).copy() for i in range(2)]
        report["shared"] = same(found[0], a + b) and same(found[1], a - b)

        mixed_in = [tensor("a", b), tensor("b", b)]  # a inline (holding b's values), b in the region
        mixed_in[1].set_shared_memory(name, n, offset=0)  # the region holds a at 0
        mixed_out = [triton.InferRequestedOutput("sum"), triton.InferRequestedOutput("difference")]
        mixed_out[0].set_shared_memory(name, n, offset=2 * n)
        answer = client.infer("pair", mixed_in, outputs=mixed_out)
        total = shm.get_contents_as_numpy(handle, np.float32, [rows, 16], offset=2 * n).copy()
        report["mixed"] = same(total, b + a) and same(answer.as_numpy("difference"), b - a)
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)

    report["config_max_batch"] = client.get_model_config("pair").config.max_batch_size
    report["metadata"] = [t.name for t in client.get_model_metadata("pair").inputs]
    client.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
