"""A folder is whole or not there, whoever else fills it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kubelora_trainer.utils.atomic_io import atomic_folder


def test_a_folder_appears_once_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "one"
    with atomic_folder(folder) as aside:
        (aside / "a").write_text("1")
        assert not folder.exists()
    assert (folder / "a").read_text() == "1"
    assert list(folder.parent.iterdir()) == [folder]


class Broken(BaseException):
    """No Exception, as a signal's is none."""


def fill(folder: Path, *, then: Callable[[], None] = lambda: None) -> None:
    with atomic_folder(folder) as aside:
        (aside / "a").write_text("1")
        then()


def fails() -> None:
    raise Broken


def test_one_that_could_not_be_filled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        fill(tmp_path / "one", then=fails)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_fill_it_the_first_ones_stays(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with atomic_folder(folder) as slow:
        (slow / "a").write_text("slow")
        with atomic_folder(folder) as quick:
            (quick / "a").write_text("quick")
    assert (folder / "a").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failure_is_told_although_another_has_filled_it(tmp_path: Path) -> None:
    def overtaken() -> None:
        fill(tmp_path / "one")
        fails()

    with pytest.raises(Broken):
        fill(tmp_path / "one", then=overtaken)
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]


def test_what_libraries_wrote_for_their_owner_alone_is_as_readable_as_any_new_file(
    tmp_path: Path,
) -> None:
    """safetensors makes files, tempfile folders, that nobody else may read."""
    tmp_path.chmod(0o2770)  # as a volume's group has it: folders inherit the group
    with atomic_folder(tmp_path / "filled") as aside:
        (aside / "unet").mkdir(mode=0o700)
        save_file({"weight": torch.ones(1)}, aside / "unet" / "model.safetensors")
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "file").touch()

    def rights(name: str) -> int:
        return (tmp_path / name).stat().st_mode

    assert rights("filled") == rights("filled/unet") == rights("usual")
    assert rights("filled/unet/model.safetensors") == rights("usual/file")
