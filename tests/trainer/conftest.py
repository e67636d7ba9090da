"""The demo's models and photographs, made once a session, and one thread for tiny matrices."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from kubelora_trainer.cli.demo import DemoPaths, create_demo
from tests.trainer.fixtures.threads import use_one_thread

use_one_thread()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """The quick layout. Tests read it and never write to it."""
    return create_demo(_folder(tmp_path_factory, "small"), "small")


@pytest.fixture(scope="session")
def full_demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """SDXL's blocks and depths. Tests read it and never write to it."""
    return create_demo(_folder(tmp_path_factory, "full"), "full", images=1)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks of `kubelora train` are forked from this process, and a stop is the test's own."""
    from tests.trainer.fixtures.torch_ranks import forking

    fork = forking(tmp_path_factory.mktemp("stacks"))
    monkeypatch.setattr("kubelora_trainer.training.run_ranks.launch", fork)
    monkeypatch.setattr("kubelora_trainer.utils.signals.StopRequest.install", lambda self: None)


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp("demo") / name
