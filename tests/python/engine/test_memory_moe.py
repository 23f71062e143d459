"""Tests of the resident memory of a model with mapped experts against --dry-run."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_runs import EngineRun
from parity import prompt
from safetensors.numpy import save_file
from tiny_models import byte_tokenizer, make_model
from tiny_moe import GPT_OSS, change_config, save_mxfp4

from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.model_files import open_files

LAYERS, EXPERTS, HIDDEN, HEADS, VOCAB = 3, 16, 512, 64, 8192
# Memory that loading needs in addition to the weights: the allocator, tables, partly used pages.
SLACK_BYTES = 8 << 20
SLACK_RATIO = 0.05


def write_big_gpt_oss(folder: Path) -> Path:
    """Write 20 MB of MXFP4 experts and 68 MB of F32, which become 34 MB of BF16."""
    rng = np.random.default_rng(1)
    tensors = {"model.norm.weight": np.ones(HIDDEN, np.float32)}

    def add(name: str, *shape: int) -> None:
        tensors[name] = (0.02 * rng.standard_normal(shape)).astype(np.float32)

    add("model.embed_tokens.weight", VOCAB, HIDDEN)
    add("lm_head.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        rows = {"q": HEADS * 64, "k": 512, "v": 512}
        for name, size in rows.items():
            add(f"{layer}.self_attn.{name}_proj.weight", size, HIDDEN)
            add(f"{layer}.self_attn.{name}_proj.bias", size)
        add(f"{layer}.self_attn.o_proj.weight", HIDDEN, HEADS * 64)
        add(f"{layer}.self_attn.o_proj.bias", HIDDEN)
        add(f"{layer}.self_attn.sinks", HEADS)
        add(f"{layer}.mlp.router.weight", EXPERTS, HIDDEN)
        add(f"{layer}.mlp.router.bias", EXPERTS)
        for name, size in (("gate_up", 2 * HIDDEN), ("down", HIDDEN)):
            base = f"{layer}.mlp.experts.{name}_proj"
            add(f"{base}_bias", EXPERTS, size)
            blocks = (EXPERTS, size, HIDDEN // 32)
            tensors[f"{base}_blocks"] = rng.integers(0, 256, (*blocks, 16), dtype=np.uint8)
            tensors[f"{base}_scales"] = rng.integers(116, 121, blocks, dtype=np.uint8)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 8,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "vocab_size": VOCAB,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


CHILD = """
import json, sys
from pathlib import Path
from engine_runs import EngineRun
from lmdeploy import _turbomind
from lmdeploy.engine.model_files import load_model

def resident(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

def load(path):
    return load_model(path, device=device, progress=False)

device = _turbomind.make_cpu_device(2)
load(sys.argv[2])  # a small model: what is imported on the way is no weight
start = resident("VmRSS:")
model = load(sys.argv[1])
loaded = resident("VmRSS:")
peak = resident("VmHWM:")
del model
with EngineRun(sys.argv[1], exact=False) as run:
    before = resident("RssFile:")
    run.greedy(list(range(3, 200)), 8)
    touched = resident("RssFile:") - before
print(json.dumps([loaded - start, peak - start, touched]))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_big_gpt_oss(tmp_path_factory.mktemp("big"))


def test_load_model_resident_memory_equals_dry_run(big: Path, tmp_path: Path) -> None:
    # Pages of packed tensors are released. Pages of experts become resident at their first use.
    small = save_mxfp4(make_model(GPT_OSS), tmp_path)
    info = open_files(str(big)).info
    tests = str(Path(__file__).parents[1] / "support")
    code = f"import sys; sys.path.insert(0, {tests!r})\n{CHILD}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(big), str(small)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, peak, touched = json.loads(done.stdout.splitlines()[-1])
    packed = info.weight_bytes - info.mapped_bytes
    largest = VOCAB * HIDDEN * (4 + 2)  # in the file, and converted
    print(f"packed {packed:,}, grown {grown:,}, peak {peak:,}; experts touched {touched:,}")
    assert info.mapped_bytes > 20e6 and info.file_bytes - info.mapped_bytes > 1.9 * packed
    assert grown < (1 + SLACK_RATIO) * packed + SLACK_BYTES
    assert peak < (1 + SLACK_RATIO) * packed + largest + SLACK_BYTES
    # 200 tokens of 4 experts each use nearly all 16 experts.
    assert 0.8 * info.mapped_bytes < touched < info.mapped_bytes + SLACK_BYTES


def test_dry_run_lines_report_bytes_of_experts(big: Path) -> None:
    info = open_files(str(big)).info
    lines = dry_run_lines(str(big), TurbomindEngineConfig(session_len=512))
    line = lines[0]
    figures = {line.split(":")[0]: line.split()[2].replace(",", "") for line in lines[-4:]}
    parts = ("reserved bytes", "scratch bytes")
    assert int(figures["peak bytes"]) == info.weight_bytes + sum(int(figures[p]) for p in parts)
    assert f"weights {info.weight_bytes:,} bytes ({info.mapped_bytes:,} of them MXFP4" in line
    values = LAYERS * EXPERTS * 3 * HIDDEN * HIDDEN
    assert info.mapped_bytes == values // 32 * 17
    exact = open_files(str(big), exact=True).info
    assert exact.mapped_bytes == 0
    assert exact.weight_bytes > info.weight_bytes + 3 * values


def test_weight_bytes_equal_those_of_the_loaded_model(big: Path) -> None:
    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    info = open_files(str(big)).info
    model = load_model(str(big), device=_turbomind.make_cpu_device(2), progress=False)
    assert model.mapped_bytes == info.mapped_bytes
    assert model.weights.num_bytes == pytest.approx(info.weight_bytes, rel=0.01)


def test_mapped_experts_outlive_the_file_and_its_reader(tmp_path: Path) -> None:
    folder = save_mxfp4(make_model(GPT_OSS), tmp_path)
    change_config(folder, eos_token_id=2)
    ids = prompt(60)
    with EngineRun(str(folder), exact=False) as run:
        wanted = run.greedy(ids, 20)
    with EngineRun(str(folder), exact=False) as run:
        (folder / "model.safetensors").unlink()
        run.model.chat_template = None
        gc.collect()
        assert run.greedy(ids, 20) == wanted


def test_load_engine_cache_leaves_room_for_experts(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experts are not yet resident when the cache is planned, but their bytes are not free.
    from lmdeploy.engine import devices, load

    free = 64 << 20
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: free)
    config = TurbomindEngineConfig(cache_max_entry_count=0.9, session_len=4096, max_batch_size=64)
    _, running = load.load_engine(str(big), config, progress=False)
    try:
        reserved = running.core.memory_plan().reserved_bytes
    finally:
        running.core.close()
    left = free - open_files(str(big)).info.mapped_bytes
    assert 0.8 * left < reserved <= 0.9 * left
