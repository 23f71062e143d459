"""Start the replicas of a model on Ray Serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmdeploy.base.checks import OptionError, check_int, refuse
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.replicas.core import Patience, ReplicatedCore
from lmdeploy.replicas.replica import EngineReplica

logger = logging.getLogger("lmdeploy")

APPLICATION = "lmdeploy"
_MAX_ONGOING = 1024  # requests of one replica; its scheduler queues those that do not fit


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of `lmdeploy serve ray`.

    Args:
        num_replicas: engines to run, or the most of them with `min_replicas`.
        min_replicas: let Ray Serve start and stop replicas by load, but keep this many. None keeps
            num_replicas.
        cpus_per_replica: cores that Ray reserves for a replica. None divides this machine's cores.
        address: address of the Ray cluster to join. None starts one on this machine.
        patience: how long a request waits for a replica.
    """

    num_replicas: int = 1
    min_replicas: int | None = None
    cpus_per_replica: float | None = None
    address: str | None = None
    patience: Patience = Patience()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        check_int("num_replicas", self.num_replicas, low=1, high=4096, flag="--num-replicas")
        if self.min_replicas is not None:
            high = self.num_replicas
            check_int("min_replicas", self.min_replicas, low=1, high=high, flag="--min-replicas")
        if self.cpus_per_replica is not None and not self.cpus_per_replica > 0:
            wanted = "a number above 0"
            raise refuse(
                "cpus_per_replica", self.cpus_per_replica, wanted=wanted, flag="--cpus-per-replica"
            )


def start_replicas(
    model_path: str, config: TurbomindEngineConfig, *, options: ReplicaOptions, log_level: str
) -> tuple[Callable[[], ReplicatedCore], Callable[[], None]]:
    """Start the replicas and wait until they serve.

    Return a function that makes a core for them, and one that stops them. Raise OptionError if Ray
    is not installed.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if options.address is None:
            # Ray then listens on loopback only. On Linux it ignores a loopback node address.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError:
        raise OptionError("num_replicas", "needs Ray. Install lmdeploy-fp4[ray].") from None
    _connect(ray, options.address)
    serve.start(proxy_location="Disabled")
    cpus = options.cpus_per_replica or (os.cpu_count() or 1) / options.num_replicas
    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.min_replicas is not None:
        limits = {"min_replicas": options.min_replicas, "max_replicas": options.num_replicas}
        scaling = {"autoscaling_config": limits}
    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=1,
        health_check_timeout_s=3,
        graceful_shutdown_timeout_s=1,  # the rest of a response is generated elsewhere
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(
            request_router_class="lmdeploy.replicas.router.PrefixRouter"
        ),
        **scaling,
    )
    if config.num_threads is None:
        config.num_threads = max(int(cpus), 1)
    app = deployment.bind(model_path, config, log_level=log_level)
    handle: Any = serve.run(app, name=APPLICATION, route_prefix=None)
    logger.warning(
        "Ray Serve opens one port for each replica on all interfaces and asks for no key there. "
        "Close them with a firewall."
    )
    plan = handle.memory_plan.remote().result()

    def make_core() -> ReplicatedCore:
        generate = handle.options(method_name="generate", stream=True).remote
        return ReplicatedCore(generate, plan=plan, patience=options.patience)

    def stop() -> None:
        serve.delete(APPLICATION)
        if options.address is None:
            serve.shutdown()
        ray.shutdown()

    return make_core, stop


def _connect(ray: Any, address: str | None) -> None:
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
