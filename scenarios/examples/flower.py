"""A Flower server and its clients, without imports from the testbed; a printed line of JSON becomes an event."""

import json
import socket
import sys
import time

import flwr
import numpy as np
import torch
from torch import nn

CLIENTS = 3
STEPS = 5
BATCH = 32


class Timed(flwr.server.strategy.FedAvg):
    """Federated averaging that reports the duration of each round."""

    last = None
    """When the round before was aggregated."""

    def aggregate_fit(self, server_round, results, failures):
        """Average the weights of the clients."""
        averaged = super().aggregate_fit(server_round, results, failures)
        now = time.perf_counter()
        # The first round is not reported, since it includes the wait for clients.
        if self.last is not None:
            event = {
                "event": "round",
                "round": server_round,
                "start": 0.0,
                "duration": now - self.last,
                "samples": sum(result.num_examples for _, result in results),
            }
            print(json.dumps(event), flush=True)
        self.last = now
        return averaged


class Client(flwr.client.NumPyClient):
    """Trains a perceptron of some 300,000 weights on samples of its own."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )
        self.samples = torch.randn(320, 64)
        self.labels = torch.randint(10, (320,))

    def get_parameters(self, config):
        """Return the weights."""
        return [value.detach().numpy() for value in self.model.parameters()]

    def fit(self, parameters, config):
        """Train from the given weights; return the new weights, the number of samples and no metrics."""
        with torch.no_grad():
            for mine, given in zip(self.model.parameters(), parameters, strict=True):
                mine.copy_(torch.from_numpy(np.array(given)))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        batches = torch.randperm(len(self.samples)).split(BATCH)
        for chosen in batches[:STEPS]:
            optimizer.zero_grad()
            outputs = self.model(self.samples[chosen])
            loss = nn.functional.cross_entropy(outputs, self.labels[chosen])
            loss.backward()
            optimizer.step()
        return self.get_parameters(config), STEPS * BATCH, {}


def wait_for_server():
    """Return once the server listens: a Flower client gives up if its first connection fails."""
    while True:
        try:
            connection = socket.create_connection(("server", 8080), timeout=1)
        except OSError:
            time.sleep(0.2)
        else:
            connection.close()
            return


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
