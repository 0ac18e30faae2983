"""Clients that stream from a server, in a process of their own, which imports no packages.

``python clients.py URL MODEL CLIENTS PROMPT NEW`` prints as JSON the seconds until each client's
first and last token, and the seconds of all clients together.
"""

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def stream(url: str, model: str, prompt: list[int], new: int) -> tuple[float, float]:
    """Stream a greedy answer; return the seconds until its first and its last token."""
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began, times, reason = time.perf_counter(), [], None
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - began)
                reason = json.loads(line[6:])["choices"][0].get("finish_reason") or reason
    if reason != "length":
        raise RuntimeError(f"an answer ended with {reason!r}")
    return times[0], times[-1]


if __name__ == "__main__":
    url, model, *sizes = sys.argv[1:]
    clients, prompt, new = map(int, sizes)
    with ThreadPoolExecutor(clients) as pool:
        for first in (1000, 0):  # the first answers warm up
            numbers = range(first, first + clients)
            texts = [[5 + (7 * n + 13 * k * k) % 250 for k in range(prompt)] for n in numbers]
            began = time.perf_counter()
            times = list(pool.map(lambda text: stream(url, model, text, new), texts))
            seconds = time.perf_counter() - began
    print(json.dumps([times, seconds]))
