"""Which ranks a job has, and which of them run on this node. No torch here.

A node runs one rank per GPU that ``workers.gpusPerNode`` names, and at least one: on a CPU
(``training.device: cpu``, or gpusPerNode 0) the number is that of processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kubelora_api import names
from kubelora_api.spec import Workers
from kubelora_trainer.data.sampler import Share
from kubelora_trainer.utils.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeTopology:
    """All ranks of a run, as one node sees them.

    node: this one, from 0. address, port: where node 0 keeps the ranks' meeting place; port 0
    means a free one of this machine.
    """

    nodes: int
    node: int
    ranks_per_node: int
    address: str
    port: int

    @property
    def size(self) -> int:
        """Ranks of the run."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RankInfo:
    """One rank's place: its number in the run and on its node, and where all meet."""

    rank: int
    local_rank: int
    size: int
    ranks_per_node: int
    address: str
    port: int

    @property
    def share(self) -> Share:
        """Which micro-steps are this rank's."""
        return Share(self.rank, self.size)


SINGLE_RANK = RankInfo(rank=0, local_rank=0, size=1, ranks_per_node=1, address=LOOPBACK, port=0)
"""Of a run of one rank."""


def rank_info_of(layout: NodeTopology, local_rank: int, port: int) -> RankInfo:
    """The place of a rank of this node. port: of the meeting place, as it was opened."""
    return RankInfo(
        rank=layout.node * layout.ranks_per_node + local_rank,
        local_rank=local_rank,
        size=layout.size,
        ranks_per_node=layout.ranks_per_node,
        address=layout.address,
        port=port,
    )


def node_topology(workers: Workers, environment: Mapping[str, str]) -> NodeTopology:
    """The ranks that ``workers`` asks for, seen from the node that the environment names.

    Raises ConfigurationError where several nodes are asked for and the environment does not say
    which one this is, or where node 0 is.
    """
    per_node = max(1, workers.gpus_per_node)
    if workers.nodes == 1:
        return NodeTopology(1, 0, per_node, LOOPBACK, 0)
    address = environment.get(names.ENV_MASTER_ADDR)
    if not address:
        raise ConfigurationError(
            f"workers.nodes is {workers.nodes}, but {names.ENV_MASTER_ADDR} is not set: start the "
            f"same command on every node, with {names.ENV_MASTER_ADDR} the address of the first "
            f"and {names.ENV_COMPLETION_INDEX} each node's number from 0; or set "
            "--set spec.workers.nodes=1 to train on this machine alone"
        )
    port = _whole(environment, names.ENV_MASTER_PORT, names.RENDEZVOUS_PORT, 1, 65535)
    node = _whole(environment, names.ENV_COMPLETION_INDEX, None, 0, workers.nodes - 1)
    return NodeTopology(workers.nodes, node, per_node, address, port)


def _whole(
    environment: Mapping[str, str], name: str, default: int | None, least: int, most: int
) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise ConfigurationError(
            f"{name} must be a whole number from {least} to {most}, found {text!r}"
        )
    return int(text)
