"""The parts that tests of the reconciler share."""

from datetime import timedelta
from typing import cast

import aiohttp

from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.kube.client import Cluster
from tests.operator.controller.fake_cluster import FakeCluster


def make_reader(cluster: FakeCluster, poll: timedelta) -> SnapshotReader:
    """A reader whose jobs have no pods to ask, so that it needs no HTTP client."""
    return SnapshotReader(cast(Cluster, cluster), cast(aiohttp.ClientSession, None), poll)
