import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from rsrv.core.errors import CompileProcessError, ProgramError, ServerStopping
from rsrv.runtime import CompileOptions, CompilePool, FakeDevice, compile_process, execute
from rsrv.runtime.compile_child import NICENESS
from rsrv.stablehlo import ProgramSignature, TensorType, report, serialize
from rsrv.stablehlo.policy import Policy

F32 = TensorType("f32", (4,))
ADD = b"""func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %b : tensor<4xf32>
  return %0 : tensor<4xf32> }"""
SORT = b"""func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.sort"(%a) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %c = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }) {dimension = 0 : i64} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32> }"""


def nested(depth):
    """`depth` cases inside each other; the parser and the compiler recurse until their stack ends."""
    opening = "".join(f'%c{level} = "stablehlo.case"(%i) ({{ ' for level in range(depth))
    closing = "".join(
        "}) : (tensor<i32>) -> tensor<4xf32>\n" + (f"stablehlo.return %c{level} : tensor<4xf32> " if level else "")
        for level in reversed(range(depth))
    )
    inner = "%x = stablehlo.add %a, %a : tensor<4xf32>\n stablehlo.return %x : tensor<4xf32> "
    return (
        "func.func @main(%i: tensor<i32>, %a: tensor<4xf32>) -> tensor<4xf32> { "
        f"{opening}{inner}{closing} return %c0 : tensor<4xf32> }}"
    ).encode()


def chain(length):
    """A chain of additions; XLA takes time that grows much faster than its length."""
    body = "\n".join(f"%{n + 1} = stablehlo.add %{n}, %0 : tensor<4xf32>" for n in range(length))
    return (
        f"func.func @main(%0: tensor<4xf32>) -> tensor<4xf32> {{ {body}\n return %{length} : tensor<4xf32> }}".encode()
    )


def swelling(times):
    """Constants of 160 MB that do not exist in the program: the compiler pads three numbers."""
    pads = "\n".join(
        f"""%k{n} = stablehlo.constant dense<[1.0, 2.0, {n}.0]> : tensor<3xf32>
        %p{n} = stablehlo.pad %k{n}, %z, low = [{n}], high = [{39999997 - n}], interior = [0] :
          (tensor<3xf32>, tensor<f32>) -> tensor<40000000xf32>"""
        for n in range(times)
    )
    results = ", ".join(f"%p{n}" for n in range(times))
    types = ", ".join(["tensor<40000000xf32>"] * times)
    return f"""func.func @main() -> ({types}) {{
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      {pads}
      return {results} : {types} }}""".encode()


def wait_for_end(pid):
    """Until the process has ended, also one that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(handle)
    assert ended, f"process {pid} is still there"


def test_a_program_compiled_in_a_process_runs_in_this_one(cpu, pool):
    compiled = pool.compile(ADD)
    assert compiled.report.signature == ProgramSignature((F32, F32), (F32,))
    assert compiled.blob is not None
    assert compiled.compile_seconds > 0
    executable = cpu.load(compiled.blob, compiled.report.signature)
    a, b = np.arange(4, dtype=np.float32), np.full(4, 0.1, np.float32)
    np.testing.assert_array_equal(execute(cpu, executable, [a, b])[0], a + b)


def test_a_program_that_sorts_comes_back_and_runs(cpu, pool):
    compiled = pool.compile(SORT)
    assert compiled.blob is not None
    (output,) = execute(cpu, cpu.load(compiled.blob, compiled.report.signature), [np.array([3, 1, 2, 0], np.float32)])
    assert output.tolist() == [0, 1, 2, 3]


def test_lapack_calls_compile_in_the_process_and_run_in_this_one(cpu, pool):
    import jax
    import jax.numpy as jnp

    lowered = jax.jit(jnp.linalg.cholesky).lower(jax.ShapeDtypeStruct((3, 3), jnp.float32))
    compiled = pool.compile(serialize(lowered.compiler_ir("stablehlo")))
    assert compiled.report.custom_calls == ("lapack_spotrf_ffi",)
    (output,) = execute(cpu, cpu.load(compiled.blob, compiled.report.signature), [4 * np.eye(3, dtype=np.float32)])
    np.testing.assert_array_equal(output, 2 * np.eye(3))


def test_inspect_gives_the_report_that_this_process_would_give(pool):
    artifact = serialize(ADD.replace(b"%b: tensor<4xf32>", b"%b: tensor<4xf32> {jax.buffer_donor = true}"))
    found = pool.inspect(artifact)
    assert found == report(artifact)
    assert found.donated == (1,)
    assert found.stablehlo_version == "1.13.7"


@pytest.mark.parametrize(
    ("program", "rule", "words"),
    [
        (b"", None, "program is empty"),
        (serialize(ADD)[:80], None, "cannot be read"),
        (serialize(ADD).replace(b"v1.13.7", b"v1.99.0"), "B-70", r"StableHLO 1\.99\.0"),
        (ADD.replace(b"stablehlo.add", b"foo.add"), "B-69", "dialect 'foo', re-export needed"),
        (b"func.func @main(%a: tensor<?xf32>) { return }", "B-10", r"argument 0 is f32\[\?\]"),
        (
            b"func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { %0 = stablehlo.custom_call @nobody(%a) : "
            b"(tensor<4xf32>) -> tensor<4xf32>\n return %0 : tensor<4xf32> }",
            None,
            "cannot be compiled for cpu: NOT_FOUND.*nobody",
        ),
    ],
)
def test_an_orderly_refusal_keeps_its_rule_and_its_process(pool, program, rule, words):
    pool.inspect(ADD)
    before = pool.pids
    with pytest.raises(ProgramError, match=words) as caught:
        pool.compile(program)
    assert caught.value.rule == rule
    assert pool.pids == before


def test_options_reach_the_compiler(pool):
    with pytest.raises(ProgramError, match="no_such_flag"):
        pool.compile(ADD, CompileOptions((("no_such_flag", 1),)))


def test_a_program_that_crashes_the_compiler_is_refused_and_the_next_one_compiles(pool):
    pool.inspect(ADD)
    (before,) = pool.pids
    with pytest.raises(ProgramError, match="compiling the program ended its process: it was ended by SIGSEGV"):
        pool.compile(nested(2000))
    assert pool.compile(ADD).blob
    (after,) = pool.pids
    assert after != before


def test_a_program_that_crashes_the_parser_is_refused(pool):
    with pytest.raises(ProgramError, match="reading the program ended its process: it was ended by SIGSEGV"):
        pool.inspect(nested(20000))


def test_a_program_that_never_leaves_the_compiler_is_refused_at_the_deadline():
    with CompilePool(timeout_seconds=8.0) as pool:
        with pytest.raises(ProgramError, match="compiling the program took longer than 8 s") as caught:
            pool.compile(chain(20000))
        assert "runtime.compile_timeout_seconds" in str(caught.value.hint)
        assert pool.inspect(ADD).signature.results == (F32,)


def test_a_program_that_takes_too_much_memory_is_refused():
    limit = 24 << 20
    with CompilePool(memory_bytes=limit, timeout_seconds=120.0) as pool:
        with pytest.raises(
            ProgramError, match=f"compiling the program took more than {limit} bytes of memory"
        ) as caught:
            pool.compile(swelling(4))
        assert "runtime.compile_memory_bytes" in str(caught.value.hint)
        assert pool.inspect(ADD).signature.results == (F32,)


def test_flipped_bits_are_refused_or_change_the_program_but_never_end_this_process():
    artifact = serialize(ADD)
    outcomes = []
    with CompilePool(timeout_seconds=20.0, memory_bytes=1 << 30) as pool:
        for seed in range(50):
            randomness = random.Random(seed)
            damaged = bytearray(artifact)
            damaged[randomness.randrange(len(damaged))] ^= 1 << randomness.randrange(8)
            try:
                outcomes.append(type(pool.compile(bytes(damaged))).__name__)
            except ProgramError:
                outcomes.append("ProgramError")
        assert pool.compile(artifact).blob
    assert outcomes.count("ProgramError") > 25
    assert set(outcomes) <= {"ProgramError", "Compiled"}


def test_a_process_that_dies_while_idle_is_replaced_without_a_word(pool):
    pool.inspect(ADD)
    (before,) = pool.pids
    os.kill(before, signal.SIGKILL)
    wait_for_end(before)
    assert pool.compile(ADD).blob
    (after,) = pool.pids
    assert after != before


def test_many_callers_share_few_processes():
    failures = []
    with CompilePool(workers=2, timeout_seconds=120.0) as pool:

        def compile_one(size):
            program = ADD.replace(b"4xf32", f"{size}xf32".encode())
            try:
                assert pool.compile(program).report.signature.results == (TensorType("f32", (size,)),)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=compile_one, args=(size,)) for size in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pool.pids) == 2
    assert failures == []


def test_closing_ends_the_processes_and_the_calls_that_wait(caplog):
    caught = []
    before = set(threading.enumerate())
    pool = CompilePool(timeout_seconds=120.0)
    pool.inspect(ADD)
    (pid,) = pool.pids
    started = threading.Barrier(3)

    def wait():
        started.wait(timeout=60)
        try:
            pool.compile(chain(20000))
        except ServerStopping as error:
            caught.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait(timeout=60)
    pool.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(caught) == 2
    wait_for_end(pid)
    assert pool.pids == ()
    assert set(threading.enumerate()) <= before  # those of other tests may have ended meanwhile
    with pytest.raises(ServerStopping):
        pool.inspect(ADD)
    pool.close()
    assert "compile_process_lost" not in caplog.text


def descriptors():
    """Each that is open, and what it is."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def test_closing_leaves_no_file_descriptor_behind():
    before = descriptors()
    with CompilePool(timeout_seconds=120.0, parse_only=True) as pool:
        pool.inspect(ADD)
        with pytest.raises(ProgramError):
            pool.inspect(nested(20000))
    assert descriptors() <= before  # those of other tests may have been closed meanwhile


def test_a_process_inherits_no_socket_and_yields_to_the_server():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.set_inheritable(True)
        with CompilePool(timeout_seconds=120.0, cpu_threads=3) as pool:
            pool.inspect(ADD)
            (pid,) = pool.pids
            targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
            assert os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS
            assert os.sched_getscheduler(pid) == os.SCHED_BATCH
            assert os.getpgid(pid) == pid
    assert [target for target in targets if target.startswith("socket:")] == []
    assert b"NPROC=3" in environment


def test_the_processes_end_with_a_server_that_is_killed():
    script = (
        "import sys; from rsrv.runtime import CompilePool\n"
        "pool = CompilePool(); pool.inspect(b'func.func @main() { return }')\n"
        "print(*pool.pids, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert os.path.exists(f"/proc/{pid}/status")
        server.kill()
    wait_for_end(pid)


def test_a_process_outlives_the_thread_that_asked_for_it(pool):
    """The kernel ties the end of a child to the thread that started it, not to its process."""
    failures = []

    def crash():
        try:
            pool.compile(nested(2000))
        except ProgramError as error:
            failures.append(error)

    thread = threading.Thread(target=crash)
    thread.start()
    thread.join()
    assert len(failures) == 1
    pool.inspect(ADD)
    before = pool.pids
    assert pool.compile(ADD).blob
    assert pool.pids == before


def test_a_process_whose_first_job_comes_late_is_not_called_slow(monkeypatch):
    monkeypatch.setattr(compile_process, "START_SECONDS", 0.0)
    settings = compile_process.ChildSettings("cpu", 0, parse_only=True, memory_bytes=None, cpu_threads=None)
    process = compile_process.CompileProcess(settings)
    assert select.select([process._replies], [], [], 60)[0]
    answer, _ = process.request({"job": "inspect"}, ADD, timeout=60.0)
    process.close()
    assert set(answer) == {"report"}


def test_a_process_that_is_too_slow_to_start_is_not_blamed_on_the_program(monkeypatch):
    monkeypatch.setattr(compile_process, "START_SECONDS", 0.0)
    settings = compile_process.ChildSettings("cpu", 0, parse_only=True, memory_bytes=None, cpu_threads=None)
    process = compile_process.CompileProcess(settings, awake=False)
    os.kill(process.pid, signal.SIGSTOP)  # however late this thread comes, it is not ready
    with pytest.raises(compile_process.ChildLost) as caught:
        process.request({"job": "inspect"}, ADD, timeout=60.0)
    process.close()
    assert (caught.value.why, caught.value.accepted) == ("deadline", False)


def test_processes_that_cannot_start_are_told_from_bad_programs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag_exists=1")
    with CompilePool() as pool, pytest.raises(CompileProcessError, match="no_such_flag_exists") as caught:
        pool.inspect(ADD)
    assert "before it took its job (attempt 3)" in caught.value.message


def test_an_interpreter_that_does_not_exist_is_an_error_of_the_pool(monkeypatch):
    monkeypatch.setattr(compile_process.sys, "executable", "/nonexistent/python")
    with pytest.raises(CompileProcessError, match="cannot be started"):
        CompilePool()


def test_a_pool_that_only_parses_compiles_nothing():
    with CompilePool(parse_only=True) as pool:
        assert pool.inspect(ADD).signature.results == (F32,)
        with pytest.raises(RuntimeError, match="parse_only"):
            pool.compile(ADD)


def test_a_pool_for_a_fake_device_gives_what_the_fake_loads():
    artifact = serialize(ADD)
    with CompilePool(platform="fake") as pool:
        compiled = pool.compile(artifact)
        with pytest.raises(ProgramError, match="cannot be read"):
            pool.compile(artifact[:70])
    assert compiled.blob == artifact
    device = FakeDevice()
    executable = device.load(compiled.blob, compiled.report.signature)
    assert execute(device, executable, [np.ones(4, np.float32)] * 2)[0].tolist() == [1.0] * 4


def libraries(pid):
    with open(f"/proc/{pid}/maps") as file:
        return {line.split("/")[-1].strip() for line in file if ".so" in line}


def test_processes_that_are_asleep_import_nothing_until_there_is_a_job():
    with CompilePool(timeout_seconds=120.0, awake=False, workers=2) as pool:
        pool.inspect(ADD)
        loaded = [any(name.startswith("libjax") for name in libraries(pid)) for pid in pool.pids]
        assert sorted(loaded) == [False, True]
        pool.wake()
        assert pool.compile(ADD).scratch_bytes == 16


def test_a_policy_reaches_the_process_and_its_summary_comes_back(pool):
    compiled = pool.compile(ADD, policy=Policy())
    assert (compiled.report.signature.results, compiled.warnings) == ((F32,), ())
    assert isinstance(compiled.summary, str)


@pytest.mark.parametrize(("keywords", "words"), [({"workers": 0}, "workers is 0"), ({"platform": "tpu"}, "'tpu'")])
def test_nonsense_arguments_are_refused(keywords, words):
    with pytest.raises(ValueError, match=words):
        CompilePool(**keywords)
