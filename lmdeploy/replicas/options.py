"""The options of `lmdeploy serve ray`. This module needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lmdeploy.base.checks import check_int, flag_of, refuse
from lmdeploy.config.option import Option, check


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of `lmdeploy serve ray`.

    Args:
        num_replicas: engines to run, or the most of them with min_replicas. Each loads the weights
            and has a cache of its own.
        min_replicas: let Ray Serve run this many to num_replicas engines, by load (default: all).
            Few replicas save memory, and requests wait while Ray starts more.
        cpus_per_replica: cores that Ray reserves for an engine (default: this machine's, divided by
            num_replicas). An engine uses as many threads unless --num-threads is given.
        gpus_per_replica: GPUs that Ray reserves for an engine, 0 to 1 (default: 1 if the cluster
            has GPUs and --device allows them). Engines with 0.5 share a GPU and need a smaller
            --cache-max-entry-count.
        address: Ray cluster of this machine to join: auto or host:port (default: start one here).
    """

    num_replicas: Annotated[int, Option(low=1, high=4096, metavar="N")] = 1
    min_replicas: Annotated[int | None, Option(low=1, metavar="N")] = None
    cpus_per_replica: Annotated[float | None, Option(above=0, metavar="CORES")] = None
    gpus_per_replica: Annotated[float | None, Option(low=0, high=1, metavar="GPUS")] = None
    address: str | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.min_replicas is not None:
            flag = flag_of("min_replicas")
            check_int("min_replicas", self.min_replicas, low=1, high=self.num_replicas, flag=flag)
        if self.address is not None and self.address.startswith("ray://"):  # has no streams
            wanted = "auto or host:port, on a machine that `ray start` has added to the cluster"
            raise refuse("address", self.address, wanted=wanted, flag=flag_of("address"))
