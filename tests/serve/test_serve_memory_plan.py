import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.core.config import RuntimeConfig, ServerConfig
from rsrv.serve.memory_plan import ModelSize, ProgramSize, plan_from, plan_memory


def size(name, weights, *programs):
    return ModelSize(
        name,
        weights,
        tuple(ProgramSize(key, scratch, inputs, 10, False, code) for key, scratch, inputs, code in programs),
    )


def plan(*models, arena=1000, measured_on="cuda", target="cuda", wiggle=0.1):
    return plan_from(models, arena, measured_on=measured_on, target=target, fraction=1.0, wiggle=wiggle)


def test_the_largest_program_of_all_sets_the_scratch_since_one_runs_at_a_time():
    made = plan(size("a", 100, (1, 5, 1, b"x"), (8, 40, 8, b"y")), size("b", 200, (1, 90, 10, b"z")))
    assert [model.scratch_bytes for model in made.models] == [48, 100]
    assert (made.budget.max_scratch, made.budget.weight_pool) == (100, 800)
    assert (made.weights_bytes, made.budget.pinned, made.budget.on_demand) == (300, 300, 500)


def test_what_does_not_fit_pinned_comes_on_demand():
    made = plan(size("a", 300), size("b", 500), size("c", 550))
    assert made.placements == {"a": "pinned", "b": "on demand", "c": "on demand"}
    assert (made.budget.pinned, made.budget.on_demand) == (300, 600)


def test_a_program_that_models_share_counts_once():
    made = plan(size("a", 1, (1, 0, 0, b"same")), size("b", 1, (1, 0, 0, b"same"), (2, 0, 0, b"own")))
    assert made.code_bytes == 20


def test_a_bundle_that_cannot_be_served_takes_no_part():
    made = plan(size("a", 1), ModelSize("b", problem="no weights"))
    assert made.placements == {"a": "pinned"}


@pytest.mark.parametrize(("measured_on", "target", "indicative"), [("cpu", "cuda", True), ("cpu", "cpu", False)])
def test_scratch_that_was_compiled_for_another_platform_is_indicative(measured_on, target, indicative):
    assert plan(size("a", 1), measured_on=measured_on, target=target).indicative is indicative


# --- with the compiler ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine", batch_sizes=(1, 8))
    tensor = ((N, 64), np.float32)
    weights = {"w": np.ones((64, 64), np.float32)}
    write_model(repo / "dense", lambda x, w: (x @ w,), {"x": tensor}, {"y": tensor}, weights=weights, batch_sizes=(4,))
    write_affine(repo / "broken")
    (repo / "broken" / "weights.safetensors").unlink()
    return repo


def config(repo, tmp_path):
    return ServerConfig(model_dirs=[str(repo)], runtime=RuntimeConfig(backend="cpu"), cache_dir=str(tmp_path))


def test_sizes_come_from_headers_signatures_and_the_compiler_and_the_second_time_from_the_cache(repo, tmp_path):
    told = []
    made = plan_memory(config(repo, tmp_path), 1 << 20, target="cpu", on_program=told.append)
    affine, broken, dense = made.models
    assert (made.measured_on, made.indicative, made.budget.arena) == ("cpu", False, 1 << 20)
    assert affine.weights_bytes == 24
    assert [(p.batch_key, p.input_bytes) for p in affine.programs] == [(1, 12), (8, 96)]
    # Outputs are scratch; this program has no temporaries.
    assert [p.scratch_bytes for p in affine.programs] == [12, 96]
    assert all(p.code_bytes > 0 for p in affine.programs)
    assert dense.weights_bytes == 64 * 64 * 4
    assert dense.programs[0].scratch_bytes >= 4 * 64 * 4
    assert dense.scratch_bytes == made.budget.max_scratch
    assert "weights.safetensors" in broken.problem
    assert sorted(told) == ["affine batch 1", "affine batch 8", "dense batch 4"]
    told.clear()
    again = plan_memory(config(repo, tmp_path), 1 << 20, on_program=told.append)
    assert told == []
    assert all(program.cached for model in again.models for program in model.programs)
    assert again.indicative
    # On a card each of the two tensors takes a whole granule, and the allocator has a share of the memory.
    assert again.models[0].weights_bytes == 512
    assert again.budget.arena == int(0.9 * (1 << 20))


def test_what_a_plan_compiled_a_server_finds_in_the_cache(repo, tmp_path):
    from support.server import ServerProcess

    plan_memory(config(repo, tmp_path), 1 << 30)
    with ServerProcess(repo, env={"RSRV_WORKER_CACHE_DIR": str(tmp_path)}) as server:
        server.wait_settled()
        assert server.metric("rsrv_worker_programs_loaded_total", source="cache") == 3
        assert server.metric("rsrv_worker_programs_loaded_total", source="compiled") == 0
        assert server.stop() == 0
