"""A configuration error names its kind by its type, so that a test need not look for words."""

import ast
from pathlib import Path

import pytest

import kubelora_trainer
from kubelora_api.names import ExitCode
from kubelora_trainer.utils.errors import DatasetError, ModelError, OutputError, StorageError

PACKAGES = ["checkpoint", "data", "models", "storage"]
ROOT = Path(kubelora_trainer.__file__).parent


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_with_a_kind_of_their_own_raise_no_bare_configuration_error(package: str) -> None:
    named = {
        f"{file.name}:{node.lineno}"
        for file in (ROOT / package).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Name) and node.id == "ConfigurationError"
    }
    assert not named


@pytest.mark.parametrize("kind", [DatasetError, ModelError, OutputError, StorageError])
def test_each_kind_is_a_configuration_error_to_the_operator(kind: type[ModelError]) -> None:
    assert kind.exit_code == ExitCode.CONFIGURATION
