"""Tests of the C++ engine through its bindings, on a tiny random model."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import (
    VOCAB,
    build_weights,
    collect,
    make_engine,
    make_request,
    model_config,
    shapes,
)

import lmdeploy
from lmdeploy import _turbomind as tm
from lmdeploy.base.checks import OptionError
from lmdeploy.config.kv_format_options import reported_formats

MODES = reported_formats()


@pytest.fixture
def engine() -> Iterator[Any]:
    made = make_engine()
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
def test_engine_greedy_tokens_are_argmax_of_their_logits(mode: str) -> None:
    engine = make_engine(mode)
    request = make_request(1, list(range(40)))
    request.logits_output = "generation"
    request.num_logprobs = 2
    engine.submit(request)
    outputs = collect(engine)
    tokens = [token for output in outputs for token in output.tokens]
    logits = np.concatenate([o.logits for o in outputs if o.logits is not None])
    assert logits.shape == (8, VOCAB)
    assert tokens == logits.argmax(axis=1).tolist()
    assert outputs[-1].finish_reason == "length"
    top = [top[0][0] for output in outputs for _, top in output.logprobs]
    assert top == tokens
    stats = engine.stats()
    assert stats.generated_tokens == 8
    assert stats.prompt_tokens == 40
    engine.check_integrity()
    engine.clear_prefix_cache()
    assert engine.stats().blocks_free == engine.stats().blocks_total
    engine.close()


def test_logits_outlive_their_output_and_engine(engine: Any) -> None:
    request = make_request(1, [1, 2, 3], 1)
    request.logits_output = "all"
    engine.submit(request)
    logits = collect(engine)[0].logits
    copy = logits.copy()
    engine.close()
    gc.collect()
    np.testing.assert_array_equal(logits, copy)


def test_token_mask_limits_tokens_and_its_failure_ends_one_request(engine: Any) -> None:
    told: list[int] = []

    def only_seven(new_tokens: list[int], mask: np.ndarray) -> bool:
        told.extend(new_tokens)
        mask[:] = 0
        mask[0] = 1 << 7
        return len(told) < 3

    request = make_request(1, [1, 2, 3])
    request.token_mask = only_seven
    engine.submit(request)
    outputs = collect(engine)
    assert [t for o in outputs for t in o.tokens] == [7, 7, 7]
    assert outputs[-1].finish_reason == "stop"

    for error, text in (
        (KeyError("no rule"), "token_mask: KeyError: 'no rule'"),
        (ValueError("our own mistake"), "token_mask: ValueError: our own mistake"),
    ):

        def broken(_: list[int], mask: np.ndarray, error: Exception = error) -> bool:
            raise error

        request = make_request(2, [1, 2, 3])
        request.token_mask = broken
        engine.submit(request)
        last = collect(engine)[-1]
        assert last.finish_reason == "error"
        assert last.error == text
        assert not last.is_request_fault
        assert engine.healthy

    def refusing(new_tokens: list[int], mask: np.ndarray) -> bool:
        raise OptionError("response_format", "has no such word.")

    request = make_request(3, [1, 2, 3])
    request.token_mask = refusing
    engine.submit(request)
    last = collect(engine)[-1]
    assert last.error == "response_format has no such word."
    assert last.is_request_fault


def test_token_mask_is_released_with_its_request(engine: Any) -> None:
    class Mask:
        def __call__(self, new_tokens: list[int], mask: np.ndarray) -> bool:
            mask[:] = -1
            return True

    mask = Mask()
    alive = weakref.ref(mask)
    request = make_request(1, [1, 2, 3])
    request.token_mask = mask
    assert request.token_mask is mask
    engine.submit(request)
    collect(engine)
    del request, mask
    engine.clear_prefix_cache()  # this waits until the step that ended the request is over
    gc.collect()
    assert alive() is None


def test_wait_outputs_releases_the_gil_and_close_wakes_it(engine: Any) -> None:
    results: list[list[Any]] = []
    waiter = threading.Thread(target=lambda: results.append(engine.wait_outputs(60_000)))
    waiter.start()
    engine.close()
    waiter.join(10)
    assert results == [[]]
    with pytest.raises(tm.InternalError, match="closed"):
        engine.submit(make_request(1, [1]))


def test_cancel_ends_the_request(engine: Any) -> None:
    request = make_request(1, [1, 2, 3], 200)
    cancelled = threading.Event()

    def wait_for_cancel(_: list[int], mask: np.ndarray) -> bool:
        mask[:] = -1
        return cancelled.wait(10)

    request.token_mask = wait_for_cancel
    engine.submit(request)
    engine.cancel(1)
    cancelled.set()
    outputs = collect(engine)
    assert outputs[-1].finish_reason == "cancelled" and len(outputs) <= 2
    engine.cancel(1)


def test_stub_has_every_kv_format() -> None:
    stub = ast.parse(Path(lmdeploy.__file__).with_name("_turbomind.pyi").read_text())
    (formats,) = (
        node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "KvFormat"
    )
    names = [ast.unparse(node.targets[0]) for node in formats.body if isinstance(node, ast.Assign)]
    assert names == [member.name for member in tm.KvFormat]


def test_enum_setters_unknown_name_lists_the_choices() -> None:
    config = tm.EngineConfig()
    with pytest.raises(
        ValueError, match=r"kv_format has value 'fp3'. It must be a KvFormat: none, int8.*nvfp4"
    ):
        config.kv_format = "fp3"
    with pytest.raises(tm.InvalidArgument, match="bfloat16"):
        model_config().dtype = "int3"
    with pytest.raises(ValueError, match="yarn"):
        tm.RopeConfig().kind = "spiral"
    with pytest.raises(ValueError, match="generation"):
        tm.Request().logits_output = "some"


def test_weights_builder_wrong_weights_are_named_in_the_error() -> None:
    device = tm.make_cpu_device(1)
    with pytest.raises(ValueError, match=r"lack tensors \(1\): layers\.1\.down"):
        build_weights(device, leave_out="layers.1.down")
    builder = tm.WeightsBuilder(model_config(), device, True)
    values = np.zeros((128, 64), np.float32)
    with pytest.raises(ValueError, match=r"has shape \[64, 128\].*requires \[128, 64\]"):
        builder.add_matrix("layers.0.q", "f32", values.reshape(64, 128), 64, 128)
    with pytest.raises(ValueError, match="no matrix named nonsense"):
        builder.add_matrix("nonsense", "f32", values, 128, 64)
    with pytest.raises(ValueError, match="bytes"):
        builder.add_matrix("layers.0.q", "f32", values[:64], 128, 64)
    with pytest.raises(ValueError, match="C-contiguous"):
        builder.add_matrix("layers.0.q", "f32", values.T, 128, 64)
    with pytest.raises(ValueError, match="dtype"):
        builder.add_matrix("layers.0.q", "f32", values.astype(np.float64), 128, 64)
    builder.add_matrix("layers.0.q", "f32", values, 128, 64)
    with pytest.raises(ValueError, match="twice"):
        builder.add_matrix("layers.0.q", "f32", values, 128, 64)


def test_weights_builder_can_build_only_once() -> None:
    device = tm.make_cpu_device(1)
    builder = tm.WeightsBuilder(model_config(), device, True)
    for name, shape in shapes().items():
        values = np.ones(shape, np.float32)
        if len(shape) == 1:
            builder.add_vector(name, values)
        else:
            builder.add_matrix(name, "f32", values, *shape)
    weights = builder.build()
    for again in (builder.build, builder.packed):
        with pytest.raises(ValueError, match="already built"):
            again()
    assert weights.num_bytes > 0


def test_constructors_reject_none() -> None:
    device = tm.make_cpu_device(1)
    with pytest.raises(TypeError):
        tm.WeightsBuilder(model_config(), None, True)
    weights = build_weights(device)
    for given in ((None, device), (weights, None)):
        with pytest.raises(TypeError):
            tm.Engine(model_config(), tm.EngineConfig(), *given, 1 << 26)
    with pytest.raises(TypeError):
        make_engine().submit(None)


@pytest.mark.parametrize("policy", [5, 12, -1, 2**70, True, 1.5, "fp3"])
def test_get_kv_cache_mode_rejects_invalid_policy(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"quant_policy"):
        tm.get_kv_cache_mode(policy)


# Limit the address space so that 64 MB remain for thread stacks.
FEW_THREADS = """
import resource
from lmdeploy import _turbomind as tm
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    tm.make_cpu_device(500)
except ValueError as error:
    print(error)
"""


def test_make_cpu_device_too_many_threads_raises_value_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The system cannot start 500 threads; it allows ")
    assert done.stdout.strip().endswith("Use fewer (--num-threads).")


LITTLE_MEMORY = """
import resource
from lmdeploy import _turbomind as tm
config = tm.ContiguousCacheConfig([("nvfp4", "nvfp4")])
config.num_heads = config.num_kv_heads = 8
config.head_dim, config.max_seq_len = 128, 1 << 20
device = tm.make_cpu_device(1)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    tm.ContiguousCache(device, config)
except MemoryError as error:
    print(error)
"""


def test_memory_that_the_system_refuses_is_told_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The system has too little free memory.")


def test_plan_memory_counts_bytes_and_checks_options() -> None:
    config = tm.EngineConfig()
    config.kv_format = "nvfp4"
    plan = tm.plan_memory(model_config(), config, 1 << 30)
    assert plan.bytes_per_token == 2 * 2 * 36
    assert plan.bytes_per_token_none == 2 * 2 * 128
    config.session_len = -1
    with pytest.raises(ValueError, match=r"session_len is -1.*--session-len"):
        tm.plan_memory(model_config(), config, 1 << 30)
