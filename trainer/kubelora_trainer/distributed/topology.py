"""Ranks of a job, and those of this node. This module does not import torch.

A node runs one rank per GPU in ``workers.gpusPerNode``, and at least one. On a CPU
(``training.device: cpu``, or gpusPerNode 0) it is the number of processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kubelora_api import names
from kubelora_api.spec import Workers
from kubelora_trainer.data.sampler import RankShare
from kubelora_trainer.utils.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeTopology:
    """All ranks of a run, as seen from one node.

    Attributes:
        nodes: Number of nodes.
        node: Index of this node, from 0.
        ranks_per_node: Ranks on each node.
        address: Address of the rendezvous on node 0.
        port: Port of the rendezvous; 0 chooses a free one.
    """

    nodes: int
    node: int
    ranks_per_node: int
    address: str
    port: int

    @property
    def size(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RankInfo:
    """One rank's numbers in the run and on its node, and the address of the rendezvous."""

    rank: int
    local_rank: int
    size: int
    ranks_per_node: int
    address: str
    port: int

    @property
    def share(self) -> RankShare:
        """Which micro-steps this rank computes."""
        return RankShare(self.rank, self.size)


SINGLE_RANK = RankInfo(rank=0, local_rank=0, size=1, ranks_per_node=1, address=LOOPBACK, port=0)
"""The only rank of a single-process run."""


def rank_info_of(layout: NodeTopology, local_rank: int, port: int) -> RankInfo:
    """Describe a rank of this node.

    Args:
        layout: Ranks of the run.
        local_rank: Index on this node.
        port: Port of the rendezvous, as it was opened.
    """
    return RankInfo(
        rank=layout.node * layout.ranks_per_node + local_rank,
        local_rank=local_rank,
        size=layout.size,
        ranks_per_node=layout.ranks_per_node,
        address=layout.address,
        port=port,
    )


def node_topology(workers: Workers, environment: Mapping[str, str]) -> NodeTopology:
    """Derive the topology from ``workers`` and this node's environment variables.

    Raises ConfigurationError if there are several nodes and the environment lacks this node's index
    or the address of node 0.
    """
    per_node = max(1, workers.gpus_per_node)
    if workers.nodes == 1:
        return NodeTopology(1, 0, per_node, LOOPBACK, 0)
    address = environment.get(names.ENV_MASTER_ADDR)
    if not address:
        raise ConfigurationError(
            f"workers.nodes is {workers.nodes}, but {names.ENV_MASTER_ADDR} is not set: start the "
            f"same command on every node, with {names.ENV_MASTER_ADDR} set to the address of the "
            f"first node and {names.ENV_COMPLETION_INDEX} to each node's index from 0; or pass "
            "--set spec.workers.nodes=1 to train only on this machine"
        )
    port = _integer(environment, names.ENV_MASTER_PORT, names.RENDEZVOUS_PORT, 1, 65535)
    node = _integer(environment, names.ENV_COMPLETION_INDEX, None, 0, workers.nodes - 1)
    return NodeTopology(workers.nodes, node, per_node, address, port)


def _integer(
    environment: Mapping[str, str], name: str, default: int | None, least: int, most: int
) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise ConfigurationError(
            f"{name} must be an integer from {least} to {most}, found {text!r}"
        )
    return int(text)
