# mypy: ignore-errors
"""Programs of `tools.bench.peers`, run in separate processes: ``python -m tools.bench.peers_program PART JSON``.

The last line of output is JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import random
import sys
import time
from typing import Any

DEVICES, MESSAGES, PEERS = 1000, 200_000, 8
"""The same amounts as in `tools.bench.simulation.messages_per_second`."""


def measure_simpy(_: dict[str, Any]) -> dict[str, Any]:
    """Return the messages per second of processor time of a SimPy model.

    Links have a rate, a delay and a queue, and every message is acknowledged.
    """
    import simpy

    chance = random.Random(1)
    world = simpy.Environment()
    events = []
    inboxes = [simpy.Store(world) for _ in range(DEVICES)]
    peers = _draw_peers(chance)
    links = _draw_links(world, chance, peers)

    def carry_message(pair: tuple[int, int], acknowledged: Any, delay: float) -> Any:
        yield world.timeout(delay)
        events.append((world.now, pair, "receive", 1000))
        inboxes[pair[1]].put((pair, acknowledged))

    def carry_acknowledgement(acknowledged: Any, delay: float) -> Any:
        yield world.timeout(delay)
        acknowledged.succeed()

    def sender(me: int) -> Any:
        for number in range(MESSAGES // DEVICES):
            pair = (me, peers[me][number % PEERS])
            queue, rate, delay = links[pair]
            acknowledged = world.event()
            with queue.request() as turn:
                yield turn
                yield world.timeout(8 * 1000 / rate)
            events.append((world.now, pair, "send", 1000))
            world.process(carry_message(pair, acknowledged, delay))
            yield acknowledged

    def receiver(me: int) -> Any:
        while True:
            pair, acknowledged = yield inboxes[me].get()
            _, _, delay = links[pair[::-1]]
            world.process(carry_acknowledgement(acknowledged, delay))

    for me in range(DEVICES):
        world.process(sender(me))
        world.process(receiver(me))
    began = time.process_time()
    world.run()
    assert len(events) == 2 * MESSAGES
    return {
        "rate": MESSAGES / (time.process_time() - began),
        "version": f"SimPy {importlib.metadata.version('simpy')}",
    }


def _draw_peers(chance: random.Random) -> dict[int, list[int]]:
    """Return the random peers to which each device sends."""
    peers = {}
    for me in range(DEVICES):
        others = [other for other in range(DEVICES) if other != me]
        peers[me] = chance.sample(others, PEERS)
    return peers


def _draw_links(
    world: Any, chance: random.Random, peers: dict[int, list[int]]
) -> dict[tuple[int, int], tuple[Any, float, float]]:
    """Return queue, rate (bit/s) and delay (seconds) of the links to all peers and back."""
    import simpy

    links = {}
    for me, others in peers.items():
        # All forward links before all backward links, since the order decides which link gets which random values.
        forward = [(me, other) for other in others]
        backward = [(other, me) for other in others]
        for pair in forward + backward:
            rate = chance.uniform(1e6, 1e8)
            delay = chance.uniform(1e-3, 5e-2)
            links[pair] = (simpy.Resource(world), rate, delay)
    return links


def measure_testbed(_: dict[str, Any]) -> dict[str, Any]:
    """Return the messages per second of processor time of the testbed's simulator."""
    from tools.bench.simulation import messages_per_second

    return {"rate": messages_per_second(DEVICES, MESSAGES, PEERS).rate}


def train_flower(training: dict[str, Any]) -> dict[str, Any]:
    """Train a perceptron on the digits by federated averaging in Flower's simulation; return accuracy and versions."""
    import flwr
    import numpy as np
    import torch
    from flwr.client import ClientApp, NumPyClient
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    from testbed.ml.data import load
    from testbed.ml.workload import DataPart

    digits = load(DataPart(name="digits"))
    # Pictures of 8x8 pixels as rows, for a perceptron.
    samples = torch.from_numpy(digits.train_images.reshape(-1, 64))
    labels = torch.from_numpy(digits.train_labels)
    tests = torch.from_numpy(digits.test_images.reshape(-1, 64))
    answers = torch.from_numpy(digits.test_labels)
    # Equal shares of samples in random order.
    order = np.random.default_rng(1).permutation(len(labels))
    shares = np.array_split(order, training["clients"])
    accuracies = []

    def network() -> Any:
        # The same initial weights for every client.
        torch.manual_seed(0)
        hidden = training["hidden"]
        return torch.nn.Sequential(
            torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )

    def network_with(weights: list[Any]) -> Any:
        model = network()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(np.array(value)))
        return model

    class Client(NumPyClient):
        def __init__(self, share: Any) -> None:
            self.share = torch.tensor(share)

        def fit(self, parameters: Any, config: Any) -> Any:
            # One thread, as each client has one processor.
            torch.set_num_threads(1)
            model = network_with(parameters)
            optimizer = torch.optim.SGD(model.parameters(), lr=training["rate"])
            shuffled = self.share[torch.randperm(len(self.share))]
            for batch in shuffled.split(training["batch"]):
                optimizer.zero_grad()
                outputs = model(samples[batch])
                torch.nn.functional.cross_entropy(outputs, labels[batch]).backward()
                optimizer.step()
            return _arrays_of(model), len(self.share), {}

    def evaluate(_round: int, parameters: Any, _config: Any) -> Any:
        with torch.no_grad():
            predictions = network_with(parameters)(tests).argmax(1)
        is_correct = predictions == answers
        accuracies.append(float(is_correct.float().mean()))
        return 0.0, {}

    def server(_context: Any) -> Any:
        initial = _arrays_of(network())
        strategy = FedAvg(
            # Only the server tests, as in the testbed.
            fraction_evaluate=0.0,
            min_available_clients=training["clients"],
            initial_parameters=flwr.common.ndarrays_to_parameters(initial),
            evaluate_fn=evaluate,
        )
        return ServerAppComponents(
            strategy=strategy, config=ServerConfig(num_rounds=training["rounds"])
        )

    def client(context: Any) -> Any:
        return Client(shares[int(context.node_config["partition-id"])]).to_client()

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        training["clients"],
        backend_config=resources,
    )
    flower = importlib.metadata.version("flwr")
    ray = importlib.metadata.version("ray")
    return {"accuracy": accuracies[-1], "version": f"flwr {flower}, ray {ray}"}


def _arrays_of(model: Any) -> list[Any]:
    """Return the weights of a network as arrays of numpy, which Flower sends."""
    return [value.detach().numpy() for value in model.parameters()]


def watch_command(command: list[str]) -> dict[str, Any]:
    """Run a command; return the seconds, processor time and peak memory (PSS) of all processes.

    Processes are sampled twenty times a second. The processor time of a process is that of its last sample.
    """
    import psutil

    began = time.monotonic()
    processor_times = {}
    peak = 0
    root = psutil.Popen(command)
    while root.poll() is None:
        size = 0
        for process in (root, *root.children(recursive=True)):
            # A process may end between the list and its sample.
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                processor_times[process.pid] = times.user + times.system
                size += process.memory_full_info().pss
        peak = max(peak, size)
        time.sleep(0.05)
    if root.returncode:
        sys.exit(root.returncode)
    return {
        "seconds": time.monotonic() - began,
        "processor": sum(processor_times.values()),
        "bytes": peak,
    }


if __name__ == "__main__":
    parts = {
        "simpy": measure_simpy,
        "ours": measure_testbed,
        "flower": train_flower,
        "watch": watch_command,
    }
    run_part = parts[sys.argv[1]]
    print(json.dumps(run_part(json.loads(sys.argv[2]))))
