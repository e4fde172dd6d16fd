"""Gateways before gateways: calls say which they have passed, and none goes round in a circle."""

import re
from contextlib import ExitStack

import grpc
import pytest
from support.gateway_site import request_body, wait_until
from support.mock_worker import MockWorker

from rsrv.core.config.gateway import GatewayConfig
from rsrv.core.errors import Code, GatewayLoop
from rsrv.gateway.app import serve_gateway
from rsrv.gateway.workers.hops import GATEWAY_KEY, MAX_HOPS, Hops, passed_by
from rsrv.protos import inference as pb

INFER = "/inference.GRPCInferenceService/"


def test_each_gateway_adds_its_mark_and_knows_its_own():
    first, second, third = Hops(), Hops(), Hops()
    passed = second.after(first.identity)[0][1]
    assert passed == f"{first.identity},{second.identity}"
    assert third.after(passed) == ((GATEWAY_KEY, f"{passed},{third.identity}"),)
    with pytest.raises(GatewayLoop, match=re.escape(f"({passed},{first.identity})")):
        first.after(passed)


def test_what_clients_make_up_counts_as_no_gateway():
    hops = Hops()
    for made_up in ("", "forged", "rsrv/1.2", ",".join(["rsrv/x"] * 1000)):
        assert hops.after(made_up) == hops.own
        assert hops.signed(((GATEWAY_KEY, made_up),)) == hops.own
    assert passed_by({}) == ()


def test_a_chain_of_gateways_has_an_end():
    passed = ""
    for _ in range(MAX_HOPS):
        passed = Hops().after(passed)[0][1]
    with pytest.raises(GatewayLoop, match=f"passed {MAX_HOPS} gateways"):
        Hops().after(passed)


def test_a_request_that_was_here_before_is_refused_and_any_other_goes_on(make_site):
    site = make_site(1)
    own, other = site.proxy.hops.identity, Hops().identity
    assert site.post(metadata={GATEWAY_KEY: other}).code is Code.OK
    assert site.mocks[0].seen("ModelInfer")[0].metadata[GATEWAY_KEY] == f"{other},{own}"
    refused = site.post(metadata={GATEWAY_KEY: f"{own},{other}"})
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "gateway_loop")
    assert f"({own},{other},{own})" in refused.error.message
    assert site.proxy.admission.inflight == 0
    assert site.status_counts() == {("ModelInfer", "m", "OK"): 1, ("ModelInfer", "m", "Unavailable"): 1}


def test_two_gateways_that_list_each_other_answer_for_each_others_workers_and_nothing_goes_round(caplog):
    with ExitStack() as stack:
        workers = [stack.enter_context(MockWorker([name, "both"])) for name in ("one", "two")]
        gateways, channels = [], []
        for worker in workers:
            config = GatewayConfig(
                endpoints=[worker.url],
                listen={"grpc": "127.0.0.1:0", "http": None},
                health_interval_seconds=60.0,
            )
            gateways.append(serve_gateway(config, blocking=False))
            stack.callback(gateways[-1].stop, 0.0)
            channel = grpc.insecure_channel(f"127.0.0.1:{gateways[-1].grpc_port}")
            channels.append(stack.enter_context(channel))
        for gateway, other in zip(gateways, reversed(gateways), strict=True):
            gateway.membership.add(f"127.0.0.1:{other.grpc_port}")
        for gateway in gateways:
            wait_until(lambda gateway=gateway: set(gateway.router.table.models) == {"one", "two", "both"})

        def infer(channel, model):
            body = channel.unary_unary(INFER + "ModelInfer")(request_body(model), timeout=20)
            return pb.ModelInferResponse.FromString(body).model_name

        for channel in channels:
            for model in ("one", "two", *["both"] * 6):
                assert infer(channel, model) == model

        own = f"127.0.0.1:{gateways[0].grpc_port}"
        gateways[0].membership.add(own)
        said = f"worker={own} does not say that it is ready: UNAVAILABLE gateway_loop the call has been at this gateway"
        wait_until(lambda: said in caplog.text)
        for gateway in gateways:
            gateway.prober.stop()  # which asks for the index, too
        seen = sum(worker.count("RepositoryIndex") for worker in workers)
        body = channels[0].unary_unary(INFER + "RepositoryIndex")(b"", timeout=20)
        assert {row.name for row in pb.RepositoryIndexResponse.FromString(body).models} == {"one", "two", "both"}
        assert sum(worker.count("RepositoryIndex") for worker in workers) == seen + 2

        channels[0].unary_unary(INFER + "SystemSharedMemoryUnregister")(b"", timeout=20)  # a call that all are to take
        assert [worker.count("SystemSharedMemoryUnregister") for worker in workers] == [1, 1]
