"""Questions to a component: does it answer now? And waiting until it does."""

from __future__ import annotations

import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from .places import Places


def answers(url: str, token: str | None = None) -> bool:
    """True when the URL answers 200. Certificates go unchecked: it is this machine."""
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        # An empty proxy map: an HTTP proxy of the environment cannot reach this machine's loopback.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=3) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def containerd_answers(places: Places) -> bool:
    if not places.containerd_socket.exists():
        return False
    done = subprocess.run(
        ["ctr", "--address", str(places.containerd_socket), "--timeout", "3s", "version"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Poll until the condition holds; False when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
