"""A Flower server and its clients: nothing here knows the testbed; a line of JSON with an "event" becomes one."""

import json
import socket
import sys
import time
from itertools import pairwise

import flwr
import numpy as np
import torch
from torch import nn

CLIENTS, STEPS, BATCH = 3, 5, 32


class Timed(flwr.server.strategy.FedAvg):
    """Federated averaging that reports when a round is over."""

    last = None

    def aggregate_fit(self, server_round, results, failures):
        """Average what the clients sent."""
        averaged, now = (
            super().aggregate_fit(server_round, results, failures),
            time.perf_counter(),
        )
        samples = sum(result.num_examples for _, result in results)
        if self.last is not None:  # the first round waits for clients
            taken = {"start": 0.0, "duration": now - self.last, "samples": samples}
            print(
                json.dumps({"event": "round", "round": server_round, **taken}),
                flush=True,
            )
        self.last = now
        return averaged


class Client(flwr.client.NumPyClient):
    """Trains a perceptron of some 300,000 weights on samples of its own."""

    def __init__(self):
        torch.manual_seed(0)
        sizes = (64, 512, 512, 10)
        layers = [
            layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())
        ]
        self.model = nn.Sequential(*layers[:-1])
        self.samples, self.labels = torch.randn(320, 64), torch.randint(10, (320,))

    def get_parameters(self, config):
        """Return the weights."""
        return [value.detach().numpy() for value in self.model.parameters()]

    def fit(self, parameters, config):
        """Train from these weights on; return those that come out, and of how many samples."""
        with torch.no_grad():
            for mine, given in zip(self.model.parameters(), parameters, strict=True):
                mine.copy_(torch.from_numpy(np.array(given)))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        for chosen in torch.randperm(len(self.samples)).split(BATCH)[:STEPS]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                self.model(self.samples[chosen]), self.labels[chosen]
            ).backward()
            optimizer.step()
        return self.get_parameters(config), STEPS * BATCH, {}


def wait_for_server():
    """Return once the server listens: a client that finds nobody gives up."""
    while True:
        try:
            return socket.create_connection(("server", 8080), timeout=1).close()
        except OSError:
            time.sleep(0.2)


if sys.argv[1] == "server":
    strategy = Timed(
        fraction_evaluate=0.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS
    )
    config = flwr.server.ServerConfig(num_rounds=int(sys.argv[2]))
    flwr.server.start_server(
        server_address="0.0.0.0:8080", config=config, strategy=strategy
    )
else:
    wait_for_server()
    flwr.client.start_client(server_address="server:8080", client=Client().to_client())
