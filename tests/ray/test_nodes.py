"""Several nodes, as Ray's own test cluster makes them on one machine: replicas on different ones,
and a node that is lost with all its processes.

Nightly. Each node has processes and an object store of its own; their network is this machine's.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions
from tests.ray.application import LOCAL, Answer, Application, Streams, patient_ray, stream
from tests.ray.loads import long_answers
from tests.serve.serving import running

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

TOKENS = 200


def places_of(name: str) -> set[str]:
    """The nodes that have a process of this deployment: Ray Serve places it anywhere."""
    from ray._private import state

    return {
        each["Address"]["NodeID"]
        for each in state.actors().values()
        if each["State"] == "ALIVE" and each["ActorClassName"].endswith(f":{name}")
    }


def test_streams_outlive_a_node():
    """Two nodes have a decode replica each. The one without the ingress, with which its streams
    would end, is lost, and another one joins."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from dsv4.integrations.ray import RayOptions, build, launch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bodies = long_answers(6, TOKENS)
    with running(ServedDemo(), max_context=1024) as alone:
        expected = [stream(alone.url, "/v1/completions", each, Answer()) for each in bodies]
    torch.set_num_threads(threads)
    os.environ |= launch.ENVIRONMENT
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
    with patient_ray():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = [cluster.add_node(**node) for _ in range(2)]
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        server = ServerOptions(max_context=1024)
        options = RayOptions(**{**LOCAL, "num_cpus": 1}, replicas=2, server=server, silence_s=3.0)
        serve.run(build(options), name="dsv4")
        found = Application(url=f"http://127.0.0.1:{port}", handle=lambda name: None)
        found.wait_for(decode=2)
        streams = Streams(url=found.url, path="/v1/completions", bodies=bodies).start()
        streams.wait_for_pieces(8)
        left = places_of("ingress")
        assert left, "no ingress is found"
        lost = next(each for each in nodes if each.node_id not in left)
        cluster.remove_node(lost, allow_graceful=False)
        for answer, wanted in zip(streams.join(), expected, strict=True):
            assert answer.error is None
            assert (answer.text, answer.finish) == (wanted.text, wanted.finish)
        still = max(answer.longest_gap_s for answer in streams.answers)
        print(f"\na node is lost: streams stood still for up to {still:.2f} s")
        with patient_ray():
            cluster.add_node(**node)
        found.wait_for(decode=2)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
