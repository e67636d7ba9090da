"""Real signals to a run of the tiny model, in each of its phases, and what a second Ctrl-C does."""

import errno
import json
import os
import pkgutil
import pty
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from kubelora_trainer.utils import signals as stop_request
from kubelora_trainer.utils.errors import InterruptedRunError
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.cli.test_main import JOB
from tests.trainer.integration.test_interruption import ENTRY

Start = Callable[..., Result]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals as they were before, afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(tmp_path: Path, demo: DemoPaths, handlers: None) -> Start:
    """`kubelora train` of the tiny job in this process, with its own signal handlers."""

    def run(*settings: str) -> Result:
        return CliRunner().invoke(main, arguments(tmp_path, demo, *settings))

    return run


def arguments(folder: Path, demo: DemoPaths, *settings: str) -> list[str]:
    (folder / "job.yaml").write_text(JOB)
    (folder / "out").mkdir(exist_ok=True)
    given = ["train", str(folder / "job.yaml")]
    for setting in settings:
        given += ["--set", setting]
    for claim, place in (("model", demo.model), ("data", demo.photos), ("output", folder / "out")):
        given += ["--mount", f"{claim}={place}"]
    return given


def signal_on_entry(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """The process gets the signal the first time that ``function`` is entered."""
    real = pkgutil.resolve_name(function)
    sent: list[bool] = []

    def entered(*positional: Any, **named: Any) -> Any:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), number)
        return real(*positional, **named)

    monkeypatch.setattr(function, entered)


CACHE = "spec.dataset.cache=pvc://output/cache"
SAMPLES = ("spec.validation.prompts=[a cat]", "spec.validation.inferenceSteps=2")
BEFORE_TRAINING = "nothing had been trained since the start"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        (
            "kubelora_trainer.cli.job_file.load_job",
            f"while the model was fetched; {BEFORE_TRAINING}",
        ),
        (
            "kubelora_trainer.training.rank_sync.claim_output",
            f"while the model was fetched; {BEFORE_TRAINING}",
        ),
        ("kubelora_trainer.training.setup._model_folder", "while the model was fetched"),
        ("kubelora_trainer.training.setup.resolve_dataset_folder", "while the data was fetched"),
        (
            "kubelora_trainer.training.setup.build_dataset",
            "while the data was checked, 1 of 8 images",
        ),
        ("kubelora_trainer.training.setup.load_base_model", "while the model was read"),
        ("kubelora_trainer.training.rank_sync.resume", "at step 0 of 3; a checkpoint is saved"),
    ],
)
def test_a_stop_before_training_ends_75_at_once_and_the_same_command_goes_on(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    sentence: str,
    number: int,
) -> None:
    with monkeypatch.context() as patch:
        signal_on_entry(patch, phase, number)
        stopped = start()
    assert stopped.exit_code == 75, stopped.output
    assert sentence in stopped.output
    assert "Traceback" not in stopped.output
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert name in stopped.output or "was checked" in stopped.output
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["state"] == "Interrupted"
    if phase.endswith("load_base_model"):
        assert start().exit_code == 0


def test_a_stop_while_the_cache_is_filled_keeps_what_is_done(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_on_entry(
            patch, "kubelora_trainer.objective.latents.LatentSource.ensure_cached", signal.SIGTERM
        )
        stopped = start(CACHE)
    assert stopped.exit_code == 75, stopped.output
    kept = re.search(r"cache was filled: (\d+) of (\d+) entries are kept", stopped.output)
    assert kept is not None
    # Eight captions come first; the image that was being encoded when the signal came is kept.
    assert int(kept[1]) == 8 + 1
    assert start(CACHE).exit_code == 0


@pytest.mark.parametrize(
    "phase",
    [
        "kubelora_trainer.training.publish.export_diffusers",
        "kubelora_trainer.training.publish.verify_export",
        "kubelora_trainer.training.publish.draw_samples",
    ],
)
def test_a_stop_in_export_or_samples_ends_75_and_only_that_is_done_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with monkeypatch.context() as patch:
        signal_on_entry(patch, phase, signal.SIGTERM)
        stopped = start(*SAMPLES)
    assert stopped.exit_code == 75, stopped.output
    assert "stopped by SIGTERM at step 3 of 3; a checkpoint is saved" in stopped.output
    assert not list((tmp_path / "out").glob("samples/*"))
    done = start(*SAMPLES)
    assert done.exit_code == 0, done.output
    assert "at step 3" in done.output
    assert "step=" not in done.output
    assert len(list((tmp_path / "out").glob("samples/*.png"))) == 1


def test_a_stop_while_samples_are_drawn_between_steps_saves_a_checkpoint_there(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_on_entry(patch, "kubelora_trainer.training.publish.draw_samples", signal.SIGTERM)
        stopped = start(*SAMPLES, "spec.validation.everySteps=1")
    assert stopped.exit_code == 75, stopped.output
    assert "at step 1 of 3; a checkpoint is saved" in stopped.output


def test_a_stop_after_the_last_word_changes_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_on_entry(monkeypatch, "kubelora_trainer.training.run.summary_text", signal.SIGTERM)
    done = start()
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output


def test_a_library_that_swallows_errors_does_not_swallow_the_stop(handlers: None) -> None:
    stop = StopRequest()
    stop.install()

    def stubborn() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        except Exception:  # as libraries do before they try again
            pytest.fail("the stop was taken for an error")

    with (
        pytest.raises(InterruptedRunError, match="SIGTERM while it was fetched"),
        stop.at_once("while it was fetched"),
    ):
        stubborn()


def test_work_that_does_not_let_go_is_ended_all_the_same(
    handlers: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop_request, "ABORT_TIMEOUT_SECONDS", 0.01)
    ended: list[int] = []
    over = threading.Event()

    def exit_process(code: int) -> None:
        ended.append(code)
        over.set()

    stop = StopRequest(exit_process)
    stop.install()

    def cling() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            assert over.wait(30)  # a pool of threads that waits for its downloads

    with pytest.raises(InterruptedRunError), stop.at_once("while it was fetched"):
        cling()
    assert ended == [75]
    assert "error: stopped by SIGTERM while it was fetched" in capfd.readouterr().err


class Terminal:
    """A process with a terminal of its own, and all that it wrote there."""

    def __init__(self, given: list[str]) -> None:
        self.child, self.descriptor = pty.fork()
        if self.child == 0:
            os.execv(sys.executable, [sys.executable, "-c", ENTRY, *given])
        self.seen = ""

    def until(self, pattern: str | None) -> None:
        """Read until the pattern is there; None: until the end."""
        while pattern is None or not re.search(pattern, self.seen):
            if not self.read():
                assert pattern is None, self.seen
                return

    def read(self) -> bool:
        """Wait for the next output; False at the end."""
        try:
            read = os.read(self.descriptor, 4096)
        except OSError as error:
            if error.errno != errno.EIO:  # how Linux tells the end of a terminal
                raise
            read = b""
        self.seen += read.decode(errors="replace")
        return bool(read)

    def press_ctrl_c(self) -> None:
        os.write(self.descriptor, b"\x03")

    def exit_code(self) -> int:
        self.until(None)
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def test_a_second_ctrl_c_ends_at_once_and_tells_what_is_lost(
    start: Start, tmp_path: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ("spec.training.steps=5000", "spec.checkpoint.everySteps=1")
    terminal = Terminal(arguments(tmp_path, demo, *often))
    manifest, checkpoints = tmp_path / "out" / "manifest.json", tmp_path / "out" / "checkpoints"

    def newest() -> int:
        saved = (int(p.name.removeprefix("step-")) for p in checkpoints.glob("step-*"))
        return max(saved, default=0)

    while newest() < 3:
        assert terminal.read(), terminal.seen
    # A disk that hangs: the next checkpoint waits for what is in this pipe.
    kept = manifest.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").replace(manifest)
    hanging = os.open(manifest, os.O_WRONLY)
    terminal.press_ctrl_c()
    terminal.until("press Ctrl-C again to stop now")
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130, terminal.seen
    os.close(hanging)
    said = f"no checkpoint was saved since step {newest()}, from which the same command resumes"
    assert said in terminal.seen
    assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l"), "hidden cursor"
    assert "Traceback" not in terminal.seen

    manifest.unlink()
    manifest.write_bytes(kept)
    with monkeypatch.context() as patch:
        signal_on_entry(patch, "kubelora_trainer.training.run.train", signal.SIGTERM)
        resumed = start(*often)
    assert f"at step {newest()}\n" in resumed.output
    assert resumed.exit_code == 75, resumed.output


def test_a_second_ctrl_c_before_any_checkpoint_says_so(
    handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    stop = StopRequest(ended.append)
    stop.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert (stop.requested, stop.name, ended) == (True, "Ctrl-C", [])
    os.kill(os.getpid(), signal.SIGTERM)  # a terminal that closes is no second Ctrl-C
    assert ended == []
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]
    assert "no checkpoint was saved since the start" in capfd.readouterr().err
