"""The manager of the operator process: connect, leader election, watch, reconcile, shut down.

Reads top-down. A replica without the Lease serves its health and waits; losing the Lease ends the
process immediately because another replica may be the leader by then.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import aiohttp
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry

from kubelora_operator.controller.apply import PlanApplier
from kubelora_operator.controller.object_store import ObjectStore
from kubelora_operator.controller.pod_reports import fetch_report
from kubelora_operator.controller.reconciler import Reconciler
from kubelora_operator.controller.report_pool import ReportPool
from kubelora_operator.controller.resync import Resync
from kubelora_operator.controller.snapshot_reader import SnapshotReader
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watch_health import WatchHealth
from kubelora_operator.controller.watches import Watches, log_in, sources_of
from kubelora_operator.controller.workqueue import WorkQueue
from kubelora_operator.decision.snapshot import JobKey
from kubelora_operator.kube import client
from kubelora_operator.kube.leader_election import Elector
from kubelora_operator.manager import http_server
from kubelora_operator.manager.options import Options
from kubelora_operator.observability.metrics import OperatorMetrics

log = logging.getLogger(__name__)
_WORKERS: Final = 32
"""Jobs that are reconciled concurrently. To start one takes three requests in a row, which an API
server short of CPU answers after half a second each: 32 then still start 20 jobs a second."""
_EXIT_LEASE_LOST: Final = 3
"""The container restarts and waits for the Lease again."""
_EXIT_NO_CLUSTER: Final = 2
"""The same code as for a wrong option: the configuration must be changed."""


def run_manager(options: Options) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    try:
        asyncio.run(_serve(options))
    except ConfigException as error:
        log.error(
            "no cluster configured: %s. Run in a pod with a service account, or set KUBECONFIG",
            error,
        )
        return _EXIT_NO_CLUSTER
    return 0


async def _serve(options: Options) -> None:
    metrics = OperatorMetrics(CollectorRegistry())
    health = WatchHealth(sources_of(options.namespaces), options.resync_seconds, time.monotonic)
    leading = asyncio.Event()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        cluster = await client.connect(metrics.api_error)
        stack.push_async_callback(cluster.close)
        runner, port = await http_server.serve_http(
            options.port, metrics.registry, lambda: health.problem() if leading.is_set() else None
        )
        stack.push_async_callback(runner.cleanup)
        log.info(
            "on standby as %s; serving /healthz and /metrics on port %d", options.identity, port
        )
        elector = Elector(
            cluster, options.lease_namespace, options.lease_name, options.identity, time.monotonic
        )
        metrics.is_leader.set(0)
        if not await _unless_stopped(elector.acquire(), stop):
            return
        metrics.is_leader.set(1)
        log.info("became the leader")
        holding = asyncio.create_task(_renew_or_exit(elector), name="lease")
        try:
            await _run_as_leader(options, cluster, metrics, health, leading, stop)
        finally:
            holding.cancel()
            await elector.release()
            log.info("released the lease")


async def _run_as_leader(
    options: Options,
    cluster: client.Cluster,
    metrics: OperatorMetrics,
    health: WatchHealth,
    leading: asyncio.Event,
    stop: asyncio.Event,
) -> None:
    """Reconcile until ``stop`` is set, or until a task that must never end has ended."""
    queue: WorkQueue[JobKey] = WorkQueue(time.monotonic)
    sources = sources_of(options.namespaces)

    def changed(key: JobKey, urgent: bool) -> None:
        queue.add(key, urgent=urgent)
        metrics.queue_depth.set(len(queue))

    metrics.watch_lag.set_function(health.missed)
    if not await _unless_stopped(_wait_for_crd(options, cluster), stop):
        return
    for source in sources:
        health.listed(source)  # what was before this replica led does not count
    leading.set()
    store = ObjectStore(sources, changed, time.monotonic)
    watches = Watches(store, sources, health, log_in)
    async with aiohttp.ClientSession(trust_env=False) as session:
        reports = ReportPool(
            partial(fetch_report, session), queue.add, options.poll_seconds, time.monotonic
        )
        reconciler = Reconciler(
            SnapshotReader(cluster, store, reports),
            PlanApplier(cluster, store, options.trainer_image, options.identity, options.network),
            metrics,
            lambda: reports.poll_seconds,
            options.progress_seconds,
            policy=options.pod_policy,
        )
        resync = Resync(
            cluster,
            store,
            sources,
            health,
            watches.restart,
            options.resync_seconds,
            time.monotonic,
        )
        parts: list[Coroutine[Any, Any, None]] = [
            watches.run(),
            resync.run(),
            _give_up_when_blind(health),
            *(reconciler.work(queue) for _ in range(_WORKERS)),
        ]
        try:
            await _until_one_ends([asyncio.create_task(part) for part in parts], stop)
        finally:
            await reports.close()


async def _give_up_when_blind(health: WatchHealth) -> None:
    """End the leader when it can list nothing: another replica may have the rights or the way."""
    while not health.blind():
        await asyncio.sleep(5)
    raise RuntimeError("; ".join(health.stale()))


async def _until_one_ends(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait for a stop or for a task that ends; cancel all tasks and raise its error."""
    stopping = asyncio.create_task(stop.wait())
    everything: set[asyncio.Task[Any]] = {*tasks, stopping}
    done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, stopping, return_exceptions=True)
    for task in tasks:
        if task in done and not task.cancelled() and (error := task.exception()):
            raise RuntimeError("a task of the operator ended unexpectedly") from error


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Await ``work``; return False if ``stop`` was set first."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    either: set[asyncio.Task[Any]] = {task, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stopping.cancel()
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _wait_for_crd(options: Options, cluster: client.Cluster) -> None:
    """Wait for the CRD, with one warning instead of one per watch."""
    while True:
        for namespace in options.namespaces or (None,):
            try:
                await cluster.list_versions(True, Kind.JOB.value, namespace)
                return
            except client.ApiError as error:
                log.warning("can't list LoraTrainingJobs yet: %s", error)
        await asyncio.sleep(5)


async def _renew_or_exit(elector: Elector) -> None:
    try:
        await elector.keep_renewing()
    except Exception as error:
        log.critical("lost the lease, exiting at once: %s", error)
        # Nothing may run after this point, not even cleanup that sends requests to the API server.
        os._exit(_EXIT_LEASE_LOST)
