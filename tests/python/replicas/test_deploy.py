"""Tests of the options of `lmdeploy serve ray`, without Ray."""

from __future__ import annotations

import pytest

from lmdeploy.cli.main import main
from lmdeploy.replicas.deploy import ReplicaOptions


def test_wrong_options_are_named():
    for options, match in (
        ({"num_replicas": 0}, "--num-replicas"),
        ({"num_replicas": 2, "min_replicas": 3}, "--min-replicas"),
        ({"cpus_per_replica": 0}, "--cpus-per-replica"),
    ):
        with pytest.raises(ValueError, match=match):
            ReplicaOptions(**options)


def test_one_address_of_events_is_not_shared(capsys):
    arguments = ["serve", "ray", "smollm2", "--num-replicas", "2", "--kv-events-config", "{}"]
    with pytest.raises(SystemExit) as failure:
        main(arguments)
    assert failure.value.code == 2
    assert "several replicas" in capsys.readouterr().err
