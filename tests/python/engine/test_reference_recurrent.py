"""The reference of recurrent layers: beside transformers, and in the C++ tests."""

import re
from pathlib import Path

import numpy as np
import pytest
from reference.recurrent import (
    gated_delta,
    pattern_convolution,
    pattern_gated_convolution,
    pattern_gated_delta,
    pattern_selective_scan,
    selective_scan,
    short_convolution,
)

VECTORS = Path(__file__).parents[2] / "cpp" / "ops" / "recurrent_vectors.h"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("kDeltaVectors", pattern_gated_delta(4, (1, 2), (16, 16))),
        ("kScanVectors", pattern_selective_scan(4, (1, 2), (16, 16))),
        ("kConvolutionVectors", pattern_convolution(6, 16, 4)),
        ("kGatedConvolutionVectors", pattern_gated_convolution(5, 16, 3)),
    ],
)
def test_the_cpp_tests_have_the_outputs_of_the_reference(name, want):
    found = re.search(rf"{name}\[\] = {{([^}}]*)}}", VECTORS.read_text())
    assert found is not None
    np.testing.assert_allclose(
        [float(value) for value in found[1].split(",")], want.ravel(), rtol=1e-11, atol=1e-13
    )


def test_the_delta_rule_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    rng = np.random.default_rng(0)
    tokens, key_heads, value_heads, key_dim, value_dim = 70, 2, 4, 16, 32
    q, k = rng.normal(size=(2, tokens, key_heads, key_dim))
    v = rng.normal(size=(tokens, value_heads, value_dim))
    b, a = 2 * rng.normal(size=(2, tokens, value_heads))
    a_log, dt_bias = rng.normal(size=(2, value_heads))
    ours = gated_delta(q, k, v, b, a, np.exp(a_log), dt_bias)

    def tensor(x):
        return torch.from_numpy(np.ascontiguousarray(x))

    softplus = torch.nn.functional.softplus(tensor(a + dt_bias))
    theirs, _ = qwen3_next.torch_recurrent_gated_delta_rule(
        tensor(np.repeat(q, 2, axis=1))[None],
        tensor(np.repeat(k, 2, axis=1))[None],
        tensor(v)[None],
        g=(-tensor(np.exp(a_log)) * softplus)[None],
        beta=tensor(b).sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    # transformers computes in FP32.
    np.testing.assert_allclose(theirs[0].numpy(), ours, rtol=1e-4, atol=2e-6)


def test_the_selective_scan_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    rng = np.random.default_rng(0)
    tokens, key_heads, value_heads, key_dim, value_dim = 70, 2, 6, 32, 16
    q, k = rng.normal(size=(2, tokens, key_heads, key_dim))
    v = rng.normal(size=(tokens, value_heads, value_dim))
    a = 2 * rng.normal(size=(tokens, value_heads))
    a_log, dt_bias, skip = rng.normal(size=(3, value_heads))
    ours = selective_scan(q, k, v, a, np.exp(a_log), dt_bias, skip)
    theirs = mamba2.mamba2_chunk_scan(
        *(torch.from_numpy(x)[None] for x in (v, a)),
        torch.from_numpy(-np.exp(a_log)),
        *(torch.from_numpy(x)[None] for x in (k, q)),
        chunk_size=16,
        D=torch.from_numpy(skip),
        dt_bias=torch.from_numpy(dt_bias),
        dt_softplus=True,
    )
    # transformers computes in FP32.
    np.testing.assert_allclose(theirs[0].numpy(), ours, rtol=1e-4, atol=2e-5)


def test_the_convolution_with_gates_is_that_of_lfm2():
    torch = pytest.importorskip("torch")
    lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    torch.manual_seed(0)
    config = lfm2.Lfm2Config(hidden_size=16, layer_types=["conv"], num_hidden_layers=1)
    layer = lfm2.Lfm2ShortConv(config, 0).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    in_gate, out_gate, values = np.split(layer.in_proj(x)[0].detach().numpy(), 3, axis=1)
    weight = layer.conv.weight[:, 0].T.detach().numpy()
    ours = out_gate * short_convolution(in_gate * values, weight, silu=False)
    theirs = layer(x)[0].detach().numpy()
    np.testing.assert_allclose(theirs, ours @ layer.out_proj.weight.T.detach().numpy())


@pytest.mark.parametrize("kernel", [2, 3, 4, 8])
def test_the_convolution_is_that_of_torch(kernel):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(kernel)
    x, weight, bias = rng.normal(size=(9, 16)), rng.normal(size=(kernel, 16)), rng.normal(size=16)
    # As transformers: padding on both sides, of which the right one is cut off.
    theirs = torch.nn.functional.conv1d(
        torch.from_numpy(x.T.copy())[None],
        torch.from_numpy(weight.T.copy())[:, None],
        torch.from_numpy(bias),
        padding=kernel - 1,
        groups=16,
    )[0, :, :9].T
    np.testing.assert_allclose(short_convolution(x, weight, bias, silu=False), theirs.numpy())
    np.testing.assert_allclose(
        short_convolution(x, weight, bias), torch.nn.functional.silu(theirs).numpy()
    )
