"""The parts that tests of the reconciler share."""

from typing import cast

from kubelora_operator.controller.report_pool import ReportPool
from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.decision.snapshot import TrainerPod, Unreachable
from kubelora_operator.kube.client import Cluster
from tests.operator.controller.fake_cluster import FakeCluster


async def _refuse(pod: TrainerPod, run_id: str) -> Unreachable:
    raise AssertionError(f"no pod of this test runs, yet {pod.name} was asked")


def make_reader(cluster: FakeCluster) -> SnapshotReader:
    """A reader whose jobs have no running pods to ask."""
    pool = ReportPool(_refuse, lambda key: None, 10, lambda: 0.0)
    return SnapshotReader(cast(Cluster, cluster), cluster.store, pool)
