"""The router's process without Ray: who is announced, who is silent, where requests go."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")

from dsv4.integrations.ray import RayOptions, build
from dsv4.integrations.ray.messages import Announcement, Failure, Role, Way
from dsv4.integrations.ray.router import RouterReplica
from dsv4.routing.names import Naming
from dsv4.serve.failures import ApiError
from dsv4.serve.options import ServerOptions
from dsv4.serve.runner import QueueFull

NAMING = Naming(fingerprint="a fingerprint", model_id="m")
IDS = np.arange(1000, dtype=np.int64)


def announced(replica: str, role: Role = "decode", **more: Any) -> Announcement:
    """Of a replica whose events nobody sends: connecting to the port waits for ever."""
    common: dict[str, Any] = {
        "endpoint": "tcp://127.0.0.1:9",
        "replay": "tcp://127.0.0.1:9",
        "naming": NAMING,
        "pid": 1,
        "node": "here",
        "resumes": False,
        "load": 0.0,
        "jobs": 0,
        "cached_tokens": 0,
        "prompt_tokens": 0,
    }
    return Announcement(replica=replica, role=role, **{**common, **more})


def asked(router: RouterReplica, ids: Any = IDS, avoided: str = "", **more: Any) -> Any:
    return router.choose(ids, more.get("salt"), more.get("session"), frozenset(avoided))


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 60))


def test_requests_go_where_their_blocks_are_and_others_where_nothing_waits():
    async def story() -> None:
        router = RouterReplica("prefix", 256, 5.0)
        assert await asked(router) is None  # Ray Serve chooses
        for name in "ab":
            await router.announce(announced(name, load=10.0 if name == "a" else 0.0))
        router._routers["decode"].stored("a", NAMING.names(IDS), "GPU")
        assert await asked(router) == Way(decode="a", prefill=None)
        assert await asked(router, IDS[::-1]) == Way(decode="b", prefill=None)
        assert (await asked(router, avoided="a")).decode == "b"
        # of another salt: nothing is cached, and b is busy with what it was just sent
        assert (await asked(router, salt="another")).decode == "a"
        await router.reroute("round-robin")
        assert {(await asked(router)).decode for _ in range(2)} == {"a", "b"}

    run(story())


def test_a_prompt_goes_to_a_prefill_replica_if_much_of_it_is_lacking():
    async def story() -> None:
        router = RouterReplica("prefix", 256, 5.0)
        await router.announce(announced("d", resumes=True))
        assert (await asked(router)).prefill is None  # there is none
        await router.announce(announced("p", "prefill"))
        assert await asked(router) == Way(decode="d", prefill="p")
        assert (await asked(router, IDS[:255])).prefill is None
        router._routers["decode"].stored("d", NAMING.names(IDS), "CPU")
        assert (await asked(router)).prefill is None
        await router.announce(announced("d", resumes=False))
        assert (await asked(router)).prefill == "p"  # its blocks are no place to go on from

    run(story())


def test_a_silent_replica_gets_nothing_and_one_under_its_name_begins_with_nothing():
    async def story() -> None:
        router = RouterReplica("prefix", 256, 0.2)
        for name in "ab":
            await router.announce(announced(name))
        router._routers["decode"].stored("a", NAMING.names(IDS), "GPU")
        await asyncio.sleep(0.25)
        await router.announce(announced("b"))
        assert (await asked(router)).decode == "b"
        assert [*(await router.state())["replicas"]] == ["b"]
        await router.announce(announced("a", endpoint="tcp://127.0.0.1:10"))
        assert (await router.state())["replicas"]["a"]["blocks"] == 0

    run(story())


def test_a_replica_that_lies_about_its_blocks_gets_no_more_than_it_can_take():
    """It says that it has every prompt: it is chosen until what it is busy with costs more."""

    async def story() -> None:
        router = RouterReplica("prefix", 256, 5.0)
        await router.announce(announced("honest"))
        await router.announce(announced("liar"))
        for first in range(20):
            router._routers["decode"].stored("liar", NAMING.names(IDS + first), "GPU")
        assert (await asked(router)).decode == "liar"
        await router.announce(announced("liar", load=1100.0))  # more than computing all of it
        assert (await asked(router)).decode == "honest"

    run(story())


@pytest.mark.parametrize("load", [float("nan"), float("inf"), -1e9])
def test_a_load_that_cannot_be_is_not_believed(load: float):
    """Nothing is less than not a number: its replica would get every request."""

    async def story() -> None:
        router = RouterReplica("prefix", 256, 0.3)
        for name in ("b", "a"):
            await router.announce(announced(name))
        router._routers["decode"].stored("a", NAMING.names(IDS), "GPU")
        await asyncio.sleep(0.2)
        await router.announce(announced("a", load=load))
        await router.announce(announced("b"))
        await asyncio.sleep(0.2)
        assert (await asked(router)).decode == "b"  # the other one has said nothing
        await router.announce(announced("a", load=0.0))
        assert [*(await router.state())["replicas"]] == ["b", "a"]

    run(story())


def test_of_two_routers_each_knows_what_it_has_heard():
    """Ray Serve may be told to run two: a replica's announcement reaches one of them."""

    async def story() -> None:
        both = [RouterReplica("prefix", 256, 5.0) for _ in range(2)]
        for name in "ab":
            await both[0].announce(announced(name))
        await both[1].announce(announced("b"))
        both[0]._routers["decode"].stored("a", NAMING.names(IDS), "GPU")
        assert (await asked(both[0])).decode == "a"
        assert (await asked(both[1])).decode == "b"  # slower, and as right

    run(story())


def test_errors_reach_the_client_as_one_server_says_them():
    failure = Failure.of(QueueFull(7, 3))
    error = failure.error()
    assert isinstance(error, ApiError)
    assert (error.status, error.retry_after_s, error.code) == (429, 3, "queue_full")
    assert not failure.is_final  # another replica may have room
    assert Failure.of(ApiError(400, "no")).is_final
    assert not Failure.of(RuntimeError("a device")).is_final


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 1, "prefill": 1, "decode": 1}, "or prefill and decode"),
        ({"prefill": 1}, "belong together"),
        ({"replicas": 0}, "greater than 0"),
        ({"replica": 1}, "not permitted"),
        ({"server": {"max_requests": 0}}, "max_requests"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        RayOptions.model_validate(options)


def test_an_application_has_the_replicas_that_were_asked_for():
    """`build` runs nothing. Strings are what `serve run` passes on."""
    options = RayOptions.model_validate({"prefill": "1", "decode": "2", "num_gpus": "0.5"})
    assert build.__annotations__["options"] is RayOptions  # Ray reads it
    ingress = build(options)._bound_deployment
    router, decode, prefill = ingress.init_args[1:]
    counts = [each._bound_deployment.num_replicas for each in (router, decode, prefill)]
    assert counts == [1, 2, 1]
    assert decode._bound_deployment.ray_actor_options["num_gpus"] == 0.5
    alone = build(RayOptions(server=ServerOptions(max_requests=2)))._bound_deployment
    assert alone.init_args[3] is None
    assert alone.init_args[2]._bound_deployment.num_replicas == 1


def test_an_ingress_that_leaves_has_the_time_of_its_longest_stream():
    """Replicas have `drain_s`: their streams go on elsewhere. Those of an ingress cannot."""
    server = ServerOptions(request_timeout_s=300.0)
    ingress = build(RayOptions(server=server, drain_s=2.0))._bound_deployment
    decode = ingress.init_args[2]._bound_deployment
    times = [each._deployment_config.graceful_shutdown_timeout_s for each in (ingress, decode)]
    assert times == [300.0, 2.0]


def test_the_yaml_of_the_docs_is_an_application():
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text("utf-8")
    (found,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (application,) = yaml.safe_load(found)["applications"]
    assert application["import_path"] == f"dsv4.integrations.ray:{build.__name__}"
    options = RayOptions.model_validate(application["args"])
    assert (options.decoders, options.server.host_tier_bytes) == (4, 256 << 30)
