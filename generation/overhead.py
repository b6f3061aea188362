"""Compare the tokens per second of a model in four containers with torch in one process.

    python generation/overhead.py SmolLM2-135M-Instruct.Q4_1.gguf

Links have no limits and devices are not paced, so only messages and processes can make containers slower than torch. A
stage computes on one thread, and with one request in flight only one stage computes at a time: the first ratio is to
torch on one thread. With four requests in flight all processors of the host are used. docs/generation.md links to the
file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import testbed
from testbed_generation.tokens import open_tokenizer
from testbed_generation.transformer import Cache, LayerShard, embed, score
from testbed_generation.weights import (
    EMBEDDING,
    NORM,
    OUTPUT,
    GgufFile,
    open_weights,
    read_layer,
)

PROMPT = "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"
DEVICES = 4


def torch_rate(file: Path, tokens: int, threads: int) -> float:
    """Return the tokens per second of a plain loop in this process, without the first token."""
    torch.set_num_threads(threads)
    weight_source = open_weights(file)
    # The prompt needs the tokenizer of a GGUF file.
    assert isinstance(weight_source, GgufFile)
    architecture = weight_source.architecture
    embedding = weight_source.read(EMBEDDING)
    norm = weight_source.read(NORM)
    output = embedding if architecture.tied else weight_source.read(OUTPUT)
    layers = []
    for number in range(architecture.layers):
        weights = read_layer(weight_source, architecture, number)
        layers.append(LayerShard(architecture, weights))
    caches = [Cache() for _ in layers]
    inputs = open_tokenizer(file).encode(PROMPT)
    times = []
    with torch.inference_mode():
        for _ in range(tokens):
            activations = embed(torch.tensor(inputs), embedding)
            for layer, cache in zip(layers, caches, strict=True):
                activations = layer.forward(activations, cache)
            logits = score(activations[-1:], norm, output, architecture.epsilon)
            # The caches have the earlier tokens, so only the newest one is computed next.
            inputs = [int(logits[0].argmax())]
            times.append(time.perf_counter())
    # The first token also waited for the prompt.
    return (tokens - 1) / (times[-1] - times[0])


def testbed_rates(file: Path, tokens: int, requests: int) -> tuple[float, float]:
    """Return the tokens per second of a request without the first token (median), and of all requests together."""
    scenario = testbed.build(
        name="overhead",
        workload={
            "task": "generate",
            "model": {"weights": str(file.resolve()), "context": 512},
            "prompts": [PROMPT] * requests,
            "tokens": tokens,
            "concurrency": requests,
            "method": {"name": "sequential", "partition": "even"},
        },
        # With a slowdown of 1, computations take as long as the host needs; only plans use the speed.
        devices={
            "device": {
                "count": DEVICES,
                "speed": "10gflops",
                "slowdown": 1,
                "memory": "3GiB",
            }
        },
        network={"topology": "mesh", "link": {"delay": "0ms"}},
    )
    metrics = testbed.emulate(scenario, accept_links=True).run.metrics
    return metrics["request_token_rate"], metrics["token_rate"]


def main() -> None:
    """Measure both sides, and print rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="weights in the GGUF format")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each text")
    options = parser.parse_args()
    file, tokens = options.file, options.tokens
    threads = torch.get_num_threads()
    alone = torch_rate(file, tokens, 1)
    print(f"torch, one thread: {alone:.1f} tokens/s")
    parallel = torch_rate(file, tokens, threads)
    print(f"torch, {threads} threads: {parallel:.1f} tokens/s")
    # With one request only one container computes at a time, so it is compared with one thread.
    single, _ = testbed_rates(file, tokens, 1)
    print(f"{DEVICES} containers, one request: {single:.1f} tokens/s")
    _, total = testbed_rates(file, tokens, DEVICES)
    print(f"{DEVICES} containers, {DEVICES} requests: {total:.1f} tokens/s")
    print(f"ratio, one request to torch on one thread: {single / alone:.2f}")
    print(
        f"ratio, {DEVICES} requests to torch on {threads} threads: {total / parallel:.2f}"
    )


if __name__ == "__main__":
    main()
