"""The operator's process loads no client that it does not use."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from kubelora_operator.manager.imports import without_synchronous_client
with without_synchronous_client():
    import kubelora_operator.manager.manager
loaded = [name for name in sys.modules if name.startswith("kubernetes.client")]
from kubernetes.aio import client
answer = client.V1Pod(api_version="v1").to_dict()["api_version"]
import kubernetes.client
later = kubernetes.client.V1Pod(api_version="v2").to_dict()["api_version"]
print(json.dumps([loaded, answer, later]))
"""


def test_the_synchronous_client_is_not_loaded_and_can_be_imported_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], "v1", "v2"]
