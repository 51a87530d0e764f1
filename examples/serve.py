"""Start the server as a process, ask it with OpenAI's client, and stop it.

    python examples/serve.py                        # SmolLM2-135M, downloaded on first use
    python examples/serve.py --max-num-seqs 16

Options are those of `python -m jaxspec.serve`: most have vLLM's names. Needs `pip install openai`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI

PRESET = Path(__file__).parents[1] / "configs" / "default.yaml"


@contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """Run the server on a free port; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxspec.serve", "--config", str(PRESET), "--port", str(port), *options]
    with subprocess.Popen(command) as process:
        try:
            while not healthy(url := f"http://127.0.0.1:{port}"):
                if process.poll() is not None:
                    sys.exit(process.returncode)  # it has said why
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()  # as Ctrl-C does: new requests get 503, running ones may finish (--drain-timeout)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False  # it does not listen yet


def main(options: Sequence[str]) -> None:
    with served(options) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=64,
            temperature=0.7,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},  # the last chunk has the usage, and the metrics
            # Not in OpenAI's API. The SLO is a target for this request: policies use it, and the metrics say if it was
            # met. `predicted_tokens` is the answer's length as the scheduler expected it; None without a predictor,
            # or while it is still compiled in the background, as just after a start.
            extra_body={"top_k": 50, "slo": {"ttft_ms": 2000, "tpot_ms": 100}, "return_predicted_tokens": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n\n{chunk.usage.completion_tokens} tokens")
                for name, value in (chunk.model_extra or {})["metrics"].items():
                    print(f"{name}: {value}")


if __name__ == "__main__":
    main(sys.argv[1:])
