"""Tests of the options of `lmdeploy serve ray`, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lmdeploy.base.checks import OptionError
from lmdeploy.cli.main import main, make_parser
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.replicas.deploy import _MIN_RAY, _connect, gpus_of_replica
from lmdeploy.replicas.options import ReplicaOptions

ROOT = Path(__file__).resolve().parents[3]


def test_wrong_options_are_named():
    for options, match in (
        ({"num_replicas": 0}, "--num-replicas"),
        ({"num_replicas": 2, "min_replicas": 3}, "--min-replicas"),
        ({"cpus_per_replica": 0}, "--cpus-per-replica"),
        ({"gpus_per_replica": 2}, "--gpus-per-replica"),
        ({"gpus_per_replica": -0.5}, "--gpus-per-replica"),
        ({"address": "ray://host:10001"}, "--address"),
    ):
        with pytest.raises(ValueError, match=match):
            ReplicaOptions(**options)


def gpus(config=None, *, total=2, **options):
    return gpus_of_replica(
        TurbomindEngineConfig(**(config or {})), ReplicaOptions(**options), total=total
    )


def test_each_replica_reserves_a_gpu_if_there_are_any():
    assert gpus(num_replicas=2) == 1
    assert gpus(num_replicas=4, gpus_per_replica=0.5) == 0.5
    assert gpus(total=0) == 0
    assert gpus({"device_type": "cpu"}, num_replicas=8) == 0
    assert gpus({"device_type": "cuda"}, num_replicas=2) == 1
    assert gpus(gpus_per_replica=0) == 0  # the device is chosen without GPUs


def test_gpus_that_do_not_exist_are_refused():
    for config, options, match in (
        ({}, {"num_replicas": 3}, "num_replicas is 3, which needs 3 GPUs, but this machine has 2"),
        ({}, {"num_replicas": 5, "gpus_per_replica": 0.5}, "needs 2.5 GPUs"),
        ({"device_type": "cuda"}, {"total": 0}, "device_type is cuda, but Ray has found no GPU"),
        ({"device_type": "cuda"}, {"gpus_per_replica": 0}, "--gpus-per-replica"),
        ({"device_type": "cpu"}, {"gpus_per_replica": 1}, "--gpus-per-replica"),
        ({"devices": [1]}, {}, "devices cannot be used with replicas"),
    ):
        with pytest.raises(OptionError, match=match):
            gpus(config, **options)
    # A cluster that is joined may get more GPUs.
    assert gpus(num_replicas=3, address="auto") == 1


def test_one_address_of_events_is_not_shared(capsys):
    arguments = ["serve", "ray", "smollm2", "--num-replicas", "2", "--kv-events-config", "{}"]
    with pytest.raises(SystemExit) as failure:
        main(arguments)
    assert failure.value.code == 2
    assert "several replicas" in capsys.readouterr().err


def test_a_ray_whose_ports_ask_for_no_token_is_refused(monkeypatch):
    lowest = ".".join(map(str, _MIN_RAY))
    assert f'\nray = ["ray[serve]>={lowest}"]\n' in (ROOT / "pyproject.toml").read_text()
    for version in ("2.9.0", "2.57.1"):
        ray = SimpleNamespace(__version__=version, serve=None)
        monkeypatch.setitem(sys.modules, "ray", ray)
        with pytest.raises(ValueError, match=rf"Ray {version} asks for no token .* Run: pip inst"):
            _connect("auto")


def test_the_kubernetes_example_is_a_valid_command():
    text = (ROOT / "docs/scaling.md").read_text()
    job, service = yaml.safe_load_all(text.split("```yaml\n")[1].split("```")[0])
    words = job["spec"]["entrypoint"].split()
    args = make_parser().parse_args(words[1:])
    assert words[0] == "lmdeploy" and args.server == "ray" and args.address == "auto"
    assert [group["replicas"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]] == [
        args.num_replicas
    ]
    assert service["spec"]["ports"] == [{"port": args.server_port}]
