"""Script of `make generate` that writes the CRD kept in the repository.

The contract package itself does not import a YAML library.
"""

from pathlib import Path

import yaml

from kubelora_api.crd import custom_resource_definition

TARGET = Path(__file__).parent / "kubelora.dev_loratrainingjobs.yaml"
HEADER = "# Generated from crds/kubelora_api by `make generate`. Do not edit.\n"


def rendered() -> str:
    """Render the CRD as YAML."""
    return HEADER + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=100)


if __name__ == "__main__":
    TARGET.write_text(rendered())
    print(f"wrote {TARGET}")
