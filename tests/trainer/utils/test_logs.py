"""Log lines of a run: sentences in a terminal, JSON objects in a pod."""

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from kubelora_api.log_lines import messages_of
from kubelora_trainer.utils.logs import configure_logging, redirect_library_logs

LOGGER = logging.getLogger("kubelora_trainer.training.run")
LIBRARY = logging.getLogger("somebodys.library")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    root, own = logging.getLogger(), logging.getLogger("kubelora_trainer")
    handlers, level, root_level = list(root.handlers), own.level, root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(root_level)
    own.setLevel(level)
    logging.captureWarnings(False)


def test_a_terminal_shows_sentences_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().setLevel(logging.INFO)  # as a library might have left it
    configure_logging("plain")
    LOGGER.info("caption :smile: holds 100% [bold]marks[/bold]")
    LOGGER.warning("port 9464 is taken")
    LOGGER.error("the disk is full")
    LIBRARY.info("loaded")
    LIBRARY.warning("deprecated")
    out, err = capsys.readouterr()
    assert out == (
        "caption :smile: holds 100% [bold]marks[/bold]\n"
        "warning: port 9464 is taken\nwarning: deprecated\n"
    )
    assert err == "error: the disk is full\n"


def test_a_rank_above_0_logs_only_warnings_and_names_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = configure_logging("plain", rank=3, world_size=4)
    console.print("no progress bar here")
    LOGGER.info("training")
    LOGGER.warning("compilation failed")
    LOGGER.error("out of memory")
    out, err = capsys.readouterr()
    assert (out, err) == (
        "warning: rank 3: compilation failed\n",
        "rank 3: error: out of memory\n",
    )


def test_json_lines_have_level_time_rank_and_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", rank=1, world_size=2, attempt=3)
    LOGGER.info("training")
    LOGGER.warning("compilation\nfailed")
    warnings.warn("an option is deprecated", FutureWarning, stacklevel=1)
    LOGGER.error("the disk is full")
    out, err = capsys.readouterr()
    own, library = (json.loads(line) for line in out.splitlines())
    assert own["time"].endswith("+00:00")
    del own["time"]
    assert own == {
        "level": "warning",
        "logger": "kubelora_trainer.training.run",
        "message": "compilation\nfailed",
        "rank": 1,
        "attempt": 3,
    }
    assert (library["logger"], library["rank"]) == ("py.warnings", 1)
    assert "FutureWarning: an option is deprecated" in library["message"]
    assert json.loads(err)["level"] == "error"


def test_handlers_of_libraries_give_way_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = logging.StreamHandler(sys.stdout)
    LIBRARY.addHandler(theirs)
    LIBRARY.propagate = False
    configure_logging("json")
    redirect_library_logs()
    LIBRARY.warning("deprecated")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["message"] == "deprecated"


def test_an_unexpected_exception_in_a_pod_is_one_json_line() -> None:
    program = (
        "from kubelora_trainer.utils.logs import configure_logging\n"
        "configure_logging('json', attempt=2)\n"
        "1 / 0\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    (line,) = ended.stderr.splitlines()
    record = json.loads(line)
    assert (record["level"], record["attempt"], ended.returncode) == ("critical", 2, 1)
    assert "ZeroDivisionError" in record["exception"]


def test_a_log_becomes_a_message_for_people_again() -> None:
    log = "\n".join(
        [
            'cut by the kubelet"}',
            '{"level": "info", "message": "resuming"}',
            '{"level": "error", "message": "job.json:3: not valid YAML", "rank": 0}',
            '{"level": "critical", "message": "unexpected", "exception": "Traceback"}',
            "Killed",
            "17",
        ]
    )
    assert messages_of(log).splitlines() == [
        'cut by the kubelet"}',
        "resuming",
        "error: job.json:3: not valid YAML",
        "critical: unexpected",
        "Traceback",
        "Killed",
        "17",
    ]
