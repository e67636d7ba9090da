"""Time to child of one tenant's jobs while another tenant's pods accept and never answer.

All parts of the operator run but the API server, which is in memory.
Hostile pods are listening sockets on loopback. Rounds without and with them alternate in one run,
so that a slow moment of the machine meets both; the last line has the ratio of the medians.

    python -m benchmarks.operator_hostile_pods --hostile 200
"""

import argparse
import asyncio
import statistics
import time
from functools import partial
from typing import Final, cast

import aiohttp
from prometheus_client import CollectorRegistry

from kubelora_api.schema import JsonObject
from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.controller.pod_reports import fetch_report
from kubelora_operator.controller.reconciler import Reconciler
from kubelora_operator.controller.report_pool import ReportPool
from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.controller.workqueue import WorkQueue
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube.client import Cluster
from kubelora_operator.observability.metrics import OperatorMetrics
from tests.operator.controller.fake_cluster import FakeCluster
from tests.operator.controller.hostile import SilentPods

_WORKERS: Final = 8
_ROUNDS: Final = 5
_POLL: Final = 10.0


async def run_round(jobs: int, hostile: int) -> list[float]:
    """Return each job's seconds from its creation until its child's.

    Args:
        jobs: Jobs that the other tenant creates, one after the other.
        hostile: Running jobs whose pods never answer, in a namespace of their own.
    """
    queue: WorkQueue[JobKey] = WorkQueue(time.monotonic)
    cluster = FakeCluster()
    cluster.connect(lambda key, urgent: queue.add(key, urgent=urgent))
    created = asyncio.Event()

    def on_request(verb: str, body: JsonObject) -> None:
        if verb == "create_child":
            created.set()

    async with SilentPods(hostile) as pods, aiohttp.ClientSession(trust_env=False) as session:
        pool = ReportPool(partial(fetch_report, session), queue.add, _POLL, time.monotonic)
        api = cast(Cluster, cluster)
        reconciler = Reconciler(
            SnapshotReader(api, cluster.store, pool),
            PlanApplier(api, cluster.store, "trainer:bench", "bench"),
            OperatorMetrics(CollectorRegistry()),
            lambda: _POLL,
        )
        workers = [asyncio.create_task(reconciler.work(queue)) for _ in range(_WORKERS)]
        for number, address in enumerate(pods.addresses):
            cluster.add_running_job(f"hostile-{number}", address, "hostile")
        await asyncio.sleep(1.0)  # the hostile jobs have been looked at and their pods asked
        cluster.fault = on_request
        seconds = []
        for number in range(jobs):
            began = time.monotonic()
            created.clear()
            cluster.add_job(f"other-{number}", "other")
            await created.wait()
            seconds.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await pool.close()
    return seconds


async def compare(jobs: int, hostile: int) -> None:
    """Print the medians without and with hostile pods, and their ratio."""
    times: dict[int, list[float]] = {0: [], hostile: []}
    for _ in range(_ROUNDS):
        for count, seconds in times.items():
            seconds += await run_round(jobs, count)
    for count, seconds in times.items():
        print(
            f"hostile={count} jobs={len(seconds)} "
            f"median_ms={1000 * statistics.median(seconds):.2f} "
            f"max_ms={1000 * max(seconds):.2f}"
        )
    ratio = statistics.median(times[hostile]) / statistics.median(times[0])
    print(f"operator-hostile-pods: hostile={hostile} ratio={ratio:.3f}")


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20, help="jobs of the other tenant a round")
    parser.add_argument("--hostile", type=int, default=200, help="pods that never answer")
    options = parser.parse_args()
    asyncio.run(compare(options.jobs, options.hostile))


if __name__ == "__main__":
    main()
