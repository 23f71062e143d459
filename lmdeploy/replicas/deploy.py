"""Start the replicas of a model on Ray Serve, update and stop them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from hashlib import blake2b
from typing import Any

from lmdeploy.base.checks import OptionError, flag_of
from lmdeploy.base.installed import install_command
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.replicas.core import ReplicatedCore
from lmdeploy.replicas.options import ReplicaOptions
from lmdeploy.replicas.replica import EngineReplica
from lmdeploy.replicas.transport import Fields
from lmdeploy.version import __version__

logger = logging.getLogger("lmdeploy")

# Calls of one replica. Its engine queues requests: if Ray Serve did, the call that reads outputs
# would wait behind them.
_MAX_ONGOING = 1 << 16
_JOIN_SECONDS = 30  # that replicas of an earlier command have to describe themselves
_MIN_RAY = (2, 58)  # the first version whose port of a replica asks for the token


class Replicas:
    """The replicas of one model. They form an application of Ray Serve.

    Commands that join one cluster and serve one model name share the replicas. If the options
    differ, the later command updates them. The last command that ends stops them.
    """

    def __init__(
        self,
        model_path: str,
        config: TurbomindEngineConfig,
        *,
        name: str,
        options: ReplicaOptions,
        log_level: str,
    ) -> None:
        """Connect to Ray, and start the replicas or find those that run. Wait until they serve.

        Args:
            model_path: as in `load_engine`.
            config: options of each engine.
            name: the name under which the model is served.
            options: options of the replicas.
            log_level: log level of the replicas.

        Raises:
            OptionError: if Ray is not installed, or if its cluster lacks the GPUs.
        """
        self._ray = _connect(options.address)
        self._options = options
        self._application = f"lmdeploy-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        self._updating = threading.Lock()
        cpus = options.cpus_per_replica or (os.cpu_count() or 1) / options.num_replicas
        if config.num_threads is None:
            config.num_threads = max(int(cpus), 1)
        gpus = gpus_of_replica(config, options, total=self._ray.cluster_resources().get("GPU", 0))
        text = repr((__version__, model_path, config, options, gpus, log_level))
        release = blake2b(text.encode(), digest_size=8).hexdigest()
        deployment = _make_deployment(options, cpus=cpus, gpus=gpus)
        self._app = deployment.bind(model_path, config, log_level=log_level, release=release)
        self._name = secrets.token_hex(8)  # of this command in the cluster
        if options.address is not None:
            self._register()
        self._handle, self._plan = self._find(release) or self._deploy()

    def make_core(self) -> ReplicatedCore:
        """Return a core that sends its requests to the replicas."""
        calls = self._handle.options(stream=True)
        return ReplicatedCore(calls.generate.remote, read=calls.read.remote, plan=self._plan)

    def update(self) -> None:
        """Replace the replicas one after another, and wait until the new ones serve.

        The new ones read the files of the model and the Python package again. Their options stay.
        """
        with self._updating:
            logger.warning("The replicas are replaced one after another.")
            try:
                self._deploy()
            except RuntimeError as error:  # the old replicas that are left still serve
                logger.error("The new replicas do not start: %s", error)
            else:
                logger.warning("All replicas are replaced.")

    def stop(self) -> None:
        """Stop the replicas unless another command uses them, and leave the cluster."""
        from ray import serve

        if self._options.address is None:
            serve.shutdown()
        elif not self._other_commands():
            serve.delete(self._application)
        self._ray.shutdown()

    def _find(self, release: str) -> tuple[Any, Fields] | None:
        """Return the handle and the memory plan of replicas of this release if they run."""
        from ray import serve

        if self._application not in serve.status().applications:
            return None
        try:
            handle: Any = serve.get_app_handle(self._application)
            found = handle.describe.remote().result(timeout_s=_JOIN_SECONDS)
        except Exception as error:  # Ray raises many kinds; then the replicas are started
            logger.warning("No replica of an earlier command answers: %s", error)
            return None
        return (handle, found["plan"]) if found["release"] == release else None

    def _deploy(self) -> tuple[Any, Fields]:
        """Start the replicas, or replace those that run. Return their handle and memory plan."""
        from ray import serve

        handle: Any = serve.run(self._app, name=self._application, route_prefix=None)
        return handle, handle.describe.remote().result()["plan"]

    def _register(self) -> None:
        """Show this command to others that join the cluster, until its process ends."""
        actor = self._ray.remote(num_cpus=0, max_restarts=-1)(_Command)
        self._command = actor.options(namespace=self._application, name=self._name).remote()

    def _other_commands(self) -> bool:
        """Return whether another command uses the replicas."""
        from ray.util import list_named_actors

        actors = list_named_actors(all_namespaces=True)
        names = {item["name"] for item in actors if item["namespace"] == self._application}
        return bool(names - {self._name})


class _Command:
    """A Ray actor that lives as long as the command that has started it."""


def _connect(address: str | None) -> Any:
    """Connect to a Ray cluster, or start one. Return Ray. Raise ValueError without a new Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        # Ray then listens on loopback only. On Linux it ignores a loopback node address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # With Ray's 15, an engine gets a thirtieth of a core that another program uses too.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ValueError(f"`lmdeploy serve ray` needs Ray. Run: {install_command('ray')}") from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < _MIN_RAY:
        raise ValueError(
            f"Ray {ray.__version__} asks for no token at the ports of replicas. "
            f"Run: {install_command('ray')}"
        )
    if address is None:  # without an address, Ray would join a cluster of this machine
        ray.init("local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    else:
        ray.init(address=address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "This Ray cluster asks for no token, so who reaches its ports can run code. Start it "
            "and this command with RAY_AUTH_MODE=token, or close the ports with a firewall."
        )
    return ray


def gpus_of_replica(
    config: TurbomindEngineConfig, options: ReplicaOptions, *, total: float
) -> float:
    """Return the GPUs to reserve for each replica.

    Ray hides all other GPUs from the replica, whose own is then the first one that CUDA lists.

    Args:
        config: options of each engine.
        options: options of the replicas.
        total: GPUs of the Ray cluster.

    Raises:
        OptionError: if the options contradict each other, or ask for more than `total`. A cluster
            that is joined may get GPUs later, so it is only asked whether it has none.
    """
    if config.devices is not None:
        reason = "cannot be used with replicas, because Ray chooses their GPUs. Remove --devices."
        raise OptionError("devices", reason)
    gpus = options.gpus_per_replica
    if gpus is None:
        gpus = 1.0 if total > 0 and config.device_type != "cpu" else 0.0
        if config.needs_cuda and not gpus:
            reason = "is cuda, but Ray has found no GPU. Change --device, or see `ray status`."
            raise OptionError("device_type", reason)
    elif gpus and config.device_type == "cpu":
        reason = f"is {gpus:g}, but the device is cpu. Remove --gpus-per-replica or --device."
        raise OptionError("gpus_per_replica", reason, flag=flag_of("gpus_per_replica"))
    elif not gpus and config.needs_cuda:
        reason = "is 0, but the device is cuda. Remove --gpus-per-replica or --device."
        raise OptionError("gpus_per_replica", reason, flag=flag_of("gpus_per_replica"))
    wanted = gpus * options.num_replicas
    if options.address is None and wanted > total:
        reason = (
            f"is {options.num_replicas}, which needs {wanted:g} GPUs, but this machine has "
            f"{total:g}. Lower --num-replicas or --gpus-per-replica."
        )
        raise OptionError("num_replicas", reason, flag=flag_of("num_replicas"))
    return gpus


def _make_deployment(options: ReplicaOptions, *, cpus: float, gpus: float) -> Any:
    """Return the deployment of Ray Serve whose replicas are engines."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.min_replicas is not None:
        limits = {"min_replicas": options.min_replicas, "max_replicas": options.num_replicas}
        scaling = {"autoscaling_config": limits}
    return serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=1,
        health_check_timeout_s=3,
        graceful_shutdown_timeout_s=1,  # the rest of a response is generated elsewhere
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="lmdeploy.replicas.router.PrefixRouter"
        ),
        **scaling,
    )
