"""Writes the CRD that is kept in the repository; `make generate` calls it.

YAML is for people who read and apply it. The contract package itself knows no YAML.
"""

from pathlib import Path

import yaml

from kubelora_api.crd import custom_resource_definition

TARGET = Path(__file__).parent / "kubelora.dev_loratrainingjobs.yaml"
HEADER = "# Generated from crds/kubelora_api by `make generate`. Do not edit.\n"


def rendered() -> str:
    """The CRD's YAML text."""
    return HEADER + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=100)


if __name__ == "__main__":
    TARGET.write_text(rendered())
    print(f"wrote {TARGET}")
