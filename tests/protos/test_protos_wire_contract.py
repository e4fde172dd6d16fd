"""Our .proto files against the wire contract: tritonclient's messages, and the control tables of the specification."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from rsrv import protos
from rsrv.protos import control, health, inference, reflection, reflection_v1alpha

ROOT = Path(__file__).resolve().parents[2]
TYPE_NAMES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def messages(*files: object) -> dict[str, Descriptor]:
    """Every message of the files by full name, nested ones (map entries too) included."""
    found: dict[str, Descriptor] = {}

    def add(message: Descriptor) -> None:
        found[message.full_name] = message
        for nested in message.nested_types:
            add(nested)

    for file in files:
        for message in file.message_types_by_name.values():
            add(message)
    return found


def enums(*files: object) -> dict[str, dict[str, int]]:
    found = [enum for file in files for enum in file.enum_types_by_name.values()]
    found += [enum for message in messages(*files).values() for enum in message.enum_types]
    return {enum.full_name: {value.name: value.number for value in enum.values} for enum in found}


def type_of(field: FieldDescriptor) -> str:
    """``int64``, ``repeated inference.ModelInput``, …"""
    target = field.message_type or field.enum_type
    name = target.full_name if target else TYPE_NAMES[field.type]
    return f"repeated {name}" if field.label == FieldDescriptor.LABEL_REPEATED else name


def fields(message: Descriptor) -> list[tuple[int, str, str, str]]:
    return sorted(
        (f.number, f.name, type_of(f), f.containing_oneof.name if f.containing_oneof else "") for f in message.fields
    )


OURS = messages(
    protos.POOL.FindFileByName("inference/grpc_predict_v2.proto"),
    protos.POOL.FindFileByName("inference/model_config.proto"),
)
THEIRS = messages(service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)


@pytest.mark.filterwarnings("ignore:label\\(\\) is deprecated")
@pytest.mark.parametrize("name", sorted(OURS.keys() & THEIRS.keys()))
def test_a_message_that_tritonclient_also_has_is_the_same_field_by_field(name):
    assert [field for field in fields(OURS[name]) if field[0] < 100] == fields(THEIRS[name])
    assert OURS[name].GetOptions().map_entry == THEIRS[name].GetOptions().map_entry


@pytest.mark.filterwarnings("ignore:label\\(\\) is deprecated")
def test_fields_of_our_own_in_their_messages_are_the_known_ones_from_number_100():
    common = sorted(OURS.keys() & THEIRS.keys())
    own = {name: [field for field in fields(OURS[name]) if field[0] >= 100] for name in common}
    assert {name: found for name, found in own.items() if found} == {
        "inference.ModelMetadataResponse": [(100, "batch_sizes", "repeated int64", "")],
        "inference.ModelMetadataResponse.TensorMetadata": [(100, "batch_axis", "int32", "_batch_axis")],
    }


def test_the_messages_that_only_one_side_has_are_the_known_ones():
    assert OURS.keys() - THEIRS.keys() == {
        "inference.IsSameIPCNamespaceRequest",
        "inference.IsSameIPCNamespaceResponse",
    }
    # Streaming, tracing and log settings: RPCs that rsrv does not have, so they answer UNIMPLEMENTED.
    assert {name.split(".")[1] for name in THEIRS.keys() - OURS.keys()} == {
        "LogSettingsRequest",
        "LogSettingsResponse",
        "ModelStreamInferResponse",
        "TraceSettingRequest",
        "TraceSettingResponse",
    }


def test_enums_are_the_same_as_tritonclients():
    ours = enums(protos.POOL.FindFileByName("inference/model_config.proto"))
    assert ours == enums(model_config_pb2.DESCRIPTOR)
    assert inference.TYPE_BF16 == model_config_pb2.TYPE_BF16 == 14


def test_rpcs_have_the_paths_and_messages_of_tritonclient():
    def rpcs(service: object) -> dict[str, tuple[str, str, bool, bool]]:
        return {
            m.name: (m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for m in service.methods
        }

    ours = rpcs(protos.services()["inference.GRPCInferenceService"])
    theirs = rpcs(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"])
    assert ours.pop("IsSameIPCNamespace") == (
        "inference.IsSameIPCNamespaceRequest",
        "inference.IsSameIPCNamespaceResponse",
        False,
        False,
    )
    assert theirs.keys() - ours.keys() == {"ModelStreamInfer", "TraceSetting", "LogSettings"}
    assert ours == {name: theirs[name] for name in ours}


def test_the_namespace_probe_carries_a_name_and_a_nonce():
    assert fields(OURS["inference.IsSameIPCNamespaceRequest"]) == [
        (1, "name", "string", ""),
        (10, "nonce", "bytes", ""),
    ]
    assert fields(OURS["inference.IsSameIPCNamespaceResponse"]) == [(1, "same", "bool", "")]


# Specification §3.6, row by row. "*" marks a repeated field; a capital letter starts a type of the same package.
CONTROL = {
    "ModelControlStatusRequest": "",
    "ModelStatus": """1 string name; 2 Residency residency; 3 bool device_resident; 4 bool host_resident;
        5 int64 weight_nbytes; 6 double weight; 7 int64 queue_depth; 8 double total_compute_seconds;
        9 uint64 requests_served; 10 uint64 dispatch_count; 11 int64 max_batch_size; 12 string batch_input_name;
        13 int64 batch_axis; 14 uint64 rows_served""",
    "ModelControlStatusResponse": """1 string residency_mode; 2 string discipline; 3 *ModelStatus models;
        4 uint64 weight_cache_max_bytes""",
    "SetModelResidencyRequest": "1 string name; 2 Residency target",
    "SetModelResidencyResponse": "1 Residency residency",
    "SetModelPolicyRequest": "1 string name; 2 bool has_weight; 3 double weight",
    "SetModelPolicyResponse": "",
    "CompactMemoryRequest": "1 *string reload_models",
    "CompactMemoryResponse": "1 int64 reloaded_models; 2 uint64 resident_bytes_after",
    "SchedulingPolicy": """1 double rebalance_compute_seconds; 2 double first_rebalance_compute_seconds;
        3 double hysteresis; 4 double ema_halflife_compute_seconds; 5 int64 default_replicas; 6 string routing_policy;
        7 double routing_fill_factor; 8 string routing_fill_mode; 9 string compaction_mode;
        10 int64 compaction_interval; 11 bool forbid_memory_oversubscription; 12 uint64 generation;
        13 string work_basis""",
    "RepackStatus": """1 double last_repack_unix_seconds; 2 double last_repack_wall_elapsed_seconds;
        3 double last_repack_compute_seconds; 4 string last_trigger; 5 int64 last_models_placed;
        6 int64 last_models_moved; 7 uint64 repack_count; 8 double compute_accumulated_seconds;
        9 double active_threshold_seconds; 10 bool first_tick_repack_done; 11 double last_tick_unix_seconds;
        12 int64 repacks_since_compaction; 13 uint64 operator_repacks_requested;
        14 uint64 operator_repacks_completed""",
    "ReplicaPlacement": "1 string worker; 2 double weight; 3 int64 outstanding; 4 int64 routed_total",
    "ModelSchedulingStatus": """1 string name; 2 int64 configured_replicas; 3 int64 effective_replicas;
        4 *ReplicaPlacement replicas; 5 double utilization; 6 double arrival_rate; 7 double cost_seconds;
        8 int64 max_batch; 9 string fill_mode; 10 int64 fill_quantum; 11 int64 weight_nbytes; 12 bool placed;
        13 bool drifted""",
    "WorkerSchedulingStatus": """1 string worker; 2 bool ready; 3 int64 models_placed; 4 double inflight_compute;
        5 int64 assigned_weight_bytes; 6 int64 weight_budget_bytes; 7 bool oversubscribed""",
    "GetSchedulingStatusRequest": "",
    "GetSchedulingStatusResponse": """1 string mode; 2 SchedulingPolicy policy; 3 RepackStatus repack;
        4 *ModelSchedulingStatus models; 5 *WorkerSchedulingStatus workers; 6 *string warnings""",
    "SetSchedulingPolicyRequest": "1 *string update_mask; 2 SchedulingPolicy policy",
    "SetSchedulingPolicyResponse": "1 SchedulingPolicy applied; 2 *string warnings; 3 bool persisted",
    "SetModelPlacementRequest": """1 string name; 2 int64 replicas; 3 string fill_mode; 4 double fill_factor;
        5 bool allow_unknown_model""",
    "SetModelPlacementResponse": """1 string name; 2 int64 configured_replicas; 3 int64 effective_replicas;
        4 string fill_mode; 5 int64 fill_quantum; 6 *string warnings; 7 bool persisted""",
    "RepackRequest": "1 double wait_seconds",
    "RepackResponse": """1 uint64 sequence; 2 uint64 completed_sequence; 3 bool completed; 4 double waited_seconds;
        5 RepackStatus repack; 6 *string warnings""",
}
# What was added to those messages (numbers from 20 up) and to the package: the membership of the fleet.
CONTROL_ADDED = {
    "ModelControlStatusResponse": "20 string incarnation",
    "ReplicaPlacement": "20 string worker_name",
    "WorkerSchedulingStatus": "20 string name; 21 bool draining",
    "SetModelPlacementRequest": "20 bool keep_replicas",
    "FleetWorker": """1 string worker; 2 string name; 3 string metrics; 4 string source; 5 bool ready; 6 bool draining;
        7 int64 inflight; 8 int64 waiting; 9 string incarnation; 10 string discipline; 11 int64 models""",
    "ListWorkersRequest": "",
    "ListWorkersResponse": "1 *FleetWorker workers",
    "AddWorkerRequest": "1 string worker; 2 string metrics; 3 string name",
    "AddWorkerResponse": "1 FleetWorker worker; 2 bool persisted",
    "RemoveWorkerRequest": "1 string worker",
    "RemoveWorkerResponse": "1 FleetWorker worker; 2 bool persisted",
    "DrainWorkerRequest": "1 string worker; 2 double deadline_seconds",
    "DrainWorkerResponse": "1 FleetWorker worker; 2 bool persisted",
    "UndrainWorkerRequest": "1 string worker",
    "UndrainWorkerResponse": "1 FleetWorker worker; 2 bool persisted",
}
CONTROL_FILE = protos.POOL.FindFileByName("control/rsrv_control.proto")


def row(text: str) -> list[tuple[int, str, str, str]]:
    parsed = []
    for field in filter(None, (part.strip() for part in text.split(";"))):
        number, kind, name = field.split()
        bare = kind.removeprefix("*")
        kind = f"reactant_control.{bare}" if bare[0].isupper() else bare
        parsed.append((int(number), name, f"repeated {kind}" if "*" in field else kind, ""))
    return parsed


@pytest.mark.filterwarnings("ignore:label\\(\\) is deprecated")
def test_the_control_messages_are_those_of_the_specification():
    ours = {name.split(".")[1]: fields(message) for name, message in messages(CONTROL_FILE).items()}
    wanted = {name: row(text) for name, text in CONTROL.items()}
    for name, text in CONTROL_ADDED.items():
        wanted[name] = wanted.get(name, []) + row(text)
    assert ours == wanted


def test_residencies_have_the_numbers_of_the_specification():
    assert enums(CONTROL_FILE) == {
        "reactant_control.Residency": {
            "RESIDENCY_UNSPECIFIED": 0,
            "UNPINNED": 1,
            "PINNED_SYSTEM": 2,
            "PINNED_DEVICE": 3,
        }
    }
    assert control.PINNED_DEVICE == control.Residency.Value("PINNED_DEVICE") == 3


def test_control_services_have_the_rpcs_of_the_specification():
    services = protos.services()
    assert [m.name for m in services["reactant_control.ControlService"].methods] == [
        "ModelControlStatus",
        "SetModelResidency",
        "SetModelPolicy",
        "CompactMemory",
    ]
    assert [m.name for m in services["reactant_control.GatewayControlService"].methods] == [
        "GetSchedulingStatus",
        "SetSchedulingPolicy",
        "SetModelPlacement",
        "Repack",
        *("ListWorkers", "AddWorker", "RemoveWorker", "DrainWorker", "UndrainWorker"),
    ]
    for service in services.values():
        for method in service.methods:
            if service.full_name.startswith("reactant_control."):
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"


def test_health_and_reflection_are_the_standard_services():
    services = protos.services()
    health_service = services["grpc.health.v1.Health"]
    assert {m.name: m.server_streaming for m in health_service.methods} == {"Check": False, "Watch": True}
    assert health.HealthCheckResponse.SERVING == 1
    assert health.HealthCheckRequest(service="a").SerializeToString() == b"\x0a\x01a"
    for version in ("v1", "v1alpha"):
        (method,) = services[f"grpc.reflection.{version}.ServerReflection"].methods
        assert method.name == "ServerReflectionInfo"
        assert method.client_streaming
        assert method.server_streaming
    request = {"file_containing_symbol": "inference.InferParameter"}
    assert (
        reflection.ServerReflectionRequest(**request).SerializeToString()
        == reflection_v1alpha.ServerReflectionRequest(**request).SerializeToString()
        == b"\x22\x18inference.InferParameter"
    )


def test_messages_travel_between_our_classes_and_tritonclients():
    ours = inference.ModelInferRequest(model_name="m", raw_input_contents=[b"abcd"])
    ours.inputs.add(name="x", datatype="FP32", shape=[1]).parameters["k"].double_param = 0.5
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert theirs.inputs[0].parameters["k"].double_param == 0.5
    assert inference.ModelInferRequest.FromString(theirs.SerializeToString()) == ours


@pytest.mark.parametrize("order", [("rsrv", "triton"), ("triton", "rsrv")])
def test_our_package_and_tritonclients_live_in_one_process_in_either_order(order):
    imports = {
        "rsrv": "from rsrv.protos import inference, control",
        "triton": "import warnings; warnings.simplefilter('ignore'); import tritonclient.grpc",
    }
    code = "\n".join(imports[name] for name in order) + "\nprint(inference.ModelConfig(name='ok').name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_generated_files_are_up_to_date():
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_are_complete_and_in_the_order_in_which_a_pool_takes_them():
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for data in protos.FILES.values():
        pool.AddSerializedFile(data)
    for name in protos.services():
        assert pool.FindServiceByName(name).full_name == name
    assert len(protos.services()) == 7


_LOST_CLASSES = """
import gc, weakref
from rsrv.protos import inference

request = inference.ModelInferRequest()
request.outputs.add(name="y")
found = weakref.ref(type(request.outputs[0]))
del request
gc.collect()
print(found() is None)
"""


def test_the_garbage_collector_takes_no_class_of_a_nested_message_that_another_thread_may_be_asking_for():
    done = subprocess.run([sys.executable, "-c", _LOST_CLASSES], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The administration of the specification (worker 11.5.2), and what was added to it, at the end of a message.
ADMIN = {
    "Empty": "",
    "Target": "1 string model; 2 uint64 if_incarnation; 3 string component",
    "Operation": """1 string model; 2 uint64 incarnation; 3 string registration; 4 string admission;
        5 string parameter_operation; 6 bool accepted; 7 bool pinned; 8 string error; 9 Accepted requests""",
    "Accepted": "1 int64 queued; 2 int64 executing; 3 int64 hooks",
    "StatusRequest": "1 string model",
    "StatusResponse": "1 string json",
    "ListModelsResponse": "1 string json",
    "RegisterRequest": """1 string model; 2 string directory; 3 string admission; 4 ?string residency; 5 ?double weight;
        6 ?int64 max_batch_size; 7 bool pinned; 8 uint64 if_incarnation""",
    "DrainRequest": "1 Target t; 2 int64 wait_ms",
    "UnregisterRequest": "1 Target t; 2 string mode",
    "WaitRequest": "1 Target t; 2 string until; 3 int64 timeout_ms",
    "ActivateRequest": "1 Target t; 2 bool allow_open",
    "DeactivateRequest": "1 Target t; 2 bool host",
    "ResidencyRequest": "1 string model; 2 string floor; 3 uint64 if_incarnation",
    "ResidencyResponse": "1 string model; 2 uint64 incarnation; 3 string floor",
    "ReclaimPolicy": "1 ?double parameter_idle_ms; 2 ?double workspace_idle_ms; 3 ?double host_idle_ms",
    "TrimRequest": "1 uint32 device; 2 uint64 target_bytes; 3 bool compact",
    "Program": """1 uint64 id; 2 string phase; 3 string label; 4 string fingerprint; 5 string diagnostics;
        6 double created_unix; 7 Shadow shadow; 8 uint64 incarnation""",
    "Shadow": """1 double percent; 2 uint64 batches; 3 uint64 skipped; 4 uint64 mismatches; 5 uint64 errors;
        6 *Shadow.LargestDifferenceEntry largest_difference; 7 string first_mismatch; 8 string first_error;
        9 uint64 against""",
    "Shadow.LargestDifferenceEntry": "1 string key; 2 double value",
    "ProgramList": "1 uint64 selected; 2 uint32 capacity; 3 *Program programs; 4 uint64 incarnation",
    "StageRequest": """1 string model; 2 uint64 base; 3 string base_directory; 4 *string sources; 5 ?bool wait;
        6 string label; 7 double shadow_percent; 8 uint64 if_incarnation""",
    "SelectRequest": "1 Target t; 2 uint64 program; 3 uint64 expected; 4 bool require_clean",
    "SelectResponse": "1 uint64 selected; 2 uint64 previous; 3 uint64 incarnation",
    "RemoveRequest": "1 Target t; 2 uint64 program",
    "ShadowRequest": """1 Target t; 2 uint64 program; 3 double percent;
        4 *ShadowRequest.TolerancesEntry tolerances""",
    "ShadowRequest.TolerancesEntry": "1 string key; 2 double value",
    "WatchRequest": "1 uint64 from_seq; 2 string model",
    "Event": """1 uint64 seq; 2 double time; 3 string model; 4 uint64 incarnation; 5 string type; 6 string from;
        7 string to; 8 string detail""",
}
ADMIN_RPCS = """
    GetStatus StatusRequest StatusResponse; ListModels Empty ListModelsResponse;
    RegisterModel RegisterRequest Operation; RetryModel Target Operation; DrainModel DrainRequest Operation;
    UndrainModel Target Operation; UnregisterModel UnregisterRequest Operation;
    ActivateModel ActivateRequest Operation; DeactivateModel DeactivateRequest Operation;
    PinModel Target Operation; UnpinModel Target Operation; SetReclaim ReclaimPolicy ReclaimPolicy;
    StageProgram StageRequest Program; ListPrograms Target ProgramList; SelectProgram SelectRequest SelectResponse;
    RemoveProgram RemoveRequest ProgramList; TrimDevice TrimRequest StatusResponse; WaitModel WaitRequest Operation;
    PollRepository Empty StatusResponse; WatchEvents WatchRequest *Event;
    SetResidency ResidencyRequest ResidencyResponse; SetShadow ShadowRequest Program"""


def admin_row(text: str) -> list[tuple[int, str, str, str]]:
    """``?`` before a type: it can be absent, which a field of its own group says in the descriptor."""
    parsed = []
    for field in filter(None, (part.strip() for part in text.split(";"))):
        number, kind, name = field.split()
        bare = kind.lstrip("*?")
        full = f"rsrv.admin.v1.{bare}" if bare[0].isupper() else bare
        parsed.append(
            (int(number), name, f"repeated {full}" if "*" in kind else full, f"_{name}" if "?" in kind else "")
        )
    return parsed


@pytest.mark.filterwarnings("ignore:label\\(\\) is deprecated")
def test_the_messages_of_administration_are_those_of_the_specification():
    found = messages(protos.POOL.FindFileByName("admin/rsrv_admin.proto"))
    ours = {name.removeprefix("rsrv.admin.v1."): fields(message) for name, message in found.items()}
    assert ours == {name: admin_row(text) for name, text in ADMIN.items()}


def test_the_service_of_administration_has_the_rpcs_of_the_specification():
    service = protos.services()["rsrv.admin.v1.AdminService"]
    ours = [
        f"{m.name} {m.input_type.name} {'*' if m.server_streaming else ''}{m.output_type.name}" for m in service.methods
    ]
    assert ours == [" ".join(rpc.split()) for rpc in ADMIN_RPCS.split(";")]
    assert not any(m.client_streaming for m in service.methods)
