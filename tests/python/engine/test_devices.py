"""Tests of devices: loading libturbomind_cuda.so, the meaning of `auto`, reports.

Some tests use the CUDA backend compiled for the CPU (libturbomind_cuda_shim.so in the build
folder). They run in subprocesses that name it in LMDEPLOY_CUDA_LIBRARY, because a process loads one
library and keeps it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_families import GEMMA4_MODELS
from tiny_models import TinyModel, make_model, save_model

from lmdeploy import TurbomindEngineConfig, _turbomind
from lmdeploy.cli import check_env
from lmdeploy.cli.main import main
from lmdeploy.config.kv_format_options import reported_formats
from lmdeploy.engine import devices
from lmdeploy.engine.kv_quality import resolve_kv_options
from lmdeploy.engine.plan import engine_config_of

ROOT = Path(__file__).parents[3]
VARIABLE = "LMDEPLOY_CUDA_LIBRARY"
CUBLAS_LT = "LMDEPLOY_CUBLASLT_LIBRARY"
FAKE = """
struct table { const char* stamp; void* rest[3]; };
static const struct table fake = {STAMP, {0}};
const struct table* turbomind_cuda_library(void) { return &fake; }
"""


def compile_library(folder: Path, code: str) -> Path:
    """Compile C code into a shared object."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "fake.c", folder / "fake.so"
    source.write_text(code)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def run(code: str, library: str | Path | None, *args: str, cublas_lt: str | Path = "") -> str:
    """Run code in a subprocess with these libraries and return its output.

    library: the CUDA library to name. None names no library.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), CUBLAS_LT: str(cublas_lt)}
    env.pop(VARIABLE, None)
    if library is not None:
        env[VARIABLE] = str(library)
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Arguments: checkpoint, device_type, quant_policy, max_prefill_token_num, prompt.
ANSWER = """
import json, sys
from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline
path, device_type, policy, step, prompt = sys.argv[1:]
config = TurbomindEngineConfig(
    device_type=device_type, quant_policy=policy, session_len=128, max_batch_size=2,
    max_prefill_token_num=int(step), cache_max_entry_count=0.01, num_threads=1, kv_quality="raw",
)
with pipeline(path, backend_config=config) as pipe:
    gen = GenerationConfig(max_new_tokens=4, ignore_eos=True, output_logits="generation")
    answer = pipe(prompt, gen_config=gen, do_preprocess=False)
    print(json.dumps([pipe.engine.start_lines(), answer.token_ids, answer.logits.tolist()]))
"""
QUESTION = "What is the capital of France?"
REFUSED = """
import sys
from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine import load as engine_parts, model_files as loader
def read(*args, **options):
    raise ValueError("weights are read")
loader.ModelFiles.load = read
try:
    engine_parts.load_engine(sys.argv[1], TurbomindEngineConfig(dtype=sys.argv[2], num_threads=1))
except ValueError as error:
    print(error)
"""
# Limit of the logits' error, relative to their standard deviation: the GPU computes with BF16
# weights and activations, the CPU with 16-bit integers.
LOGIT_TOLERANCE = 0.05
WHY = "from lmdeploy import _turbomind; print(_turbomind.cuda_devices())"


def why(library: Path) -> str:
    """Return the reason why a library is not used, and check that no device was found."""
    found = re.fullmatch(r"\(\[\], (['\"])(.*)\1\)", run(WHY, library))
    assert found, "The output is not an empty list and one reason."
    return found[2]


def test_cuda_devices_missing_library_error_says_how_to_build_it(tmp_path, monkeypatch):
    missing = tmp_path / "none.so"
    text = why(missing)
    assert text.startswith(f"{VARIABLE}: no {missing} was found. Build it") and "TM_CUDA=ON" in text
    # Without the variable, the library is expected next to the module.
    default = Path(_turbomind.__file__).parent / "libturbomind_cuda.so"
    if not default.exists():
        assert f"no {default} was found. Build it" in run(WHY, None)


def test_cuda_devices_unusable_file_is_rejected(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library\n")
    assert re.match(rf"{VARIABLE}: cannot be loaded: .*text\.so", why(path))
    library = compile_library(tmp_path, "int other(void) { return 1; }")
    assert "has no symbol turbomind_cuda_library" in why(library)


@pytest.mark.parametrize("stamp", ['"0.0.9 abc"', '"two\\nlines"', '""', "0"])
def test_cuda_devices_library_of_another_version_is_rejected(tmp_path, stamp):
    text = why(compile_library(tmp_path, FAKE.replace("STAMP", stamp)))
    assert "was built for another version" in text and _turbomind.cuda_stamp in text


def test_cuda_devices_shim_is_accepted_only_by_name(tmp_path, shim):
    # A copy in the place of the real library is rejected.
    package = tmp_path / "lmdeploy"
    shutil.copytree(ROOT / "lmdeploy", package, ignore=shutil.ignore_patterns("libturbomind*"))
    shutil.copy(shim, package / "libturbomind_cuda.so")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + WHY
    text = run(code, None)
    assert "was built for another version" in text and "shim" in text
    assert "CudaDeviceInfo" in run(WHY, shim)


def test_open_device_requested_gpu_without_cuda_raises_value_error():
    # In the tests, LMDEPLOY_CUDA_LIBRARY names a file that is not a library.
    for options in ({"device_type": "cuda"}, {"devices": [0]}):
        with pytest.raises(ValueError, match="CUDA is not used: LMDEPLOY_CUDA_LIBRARY") as caught:
            devices.open_device(TurbomindEngineConfig(**options))
        text = str(caught.value)
        assert "\n" not in text and re.search(r"[^.]\. Change --device or --devices\.$", text)
    with pytest.raises(_turbomind.InvalidArgument, match="CUDA is not used"):
        _turbomind.make_cuda_device(0)


def test_api_server_missing_gpu_is_a_one_line_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "api_server", "smollm2", "--dry-run", "--device", "cuda"])
    text = capsys.readouterr().err
    assert caught.value.code == 2 and text.count("\n") == 1 and "CUDA is not used" in text


def test_open_device_auto_without_cuda_uses_the_cpu(caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO", "lmdeploy")
    opened = devices.open_device(TurbomindEngineConfig(num_threads=1))
    assert opened.free_bytes is None and opened.capability.generation == "CPU"
    assert devices.device_line(opened).startswith("device: cpu (")
    assert devices.free_bytes(opened) > 1 << 20
    assert [(r.levelname, "CUDA is not used" in r.message) for r in caplog.records] == [
        ("INFO", True)
    ]
    monkeypatch.setattr(devices, "_DRIVER_FILE", str(tmp_path))  # now a driver is present
    devices.open_device(TurbomindEngineConfig(num_threads=1))
    assert caplog.records[-1].levelname == "WARNING"
    caplog.clear()
    devices.open_device(TurbomindEngineConfig(num_threads=1, device_type="cpu"))
    assert caplog.records == []


@pytest.mark.parametrize("devices", [[0, 1], [], [-1], [True], ["0"], 0, "0"])
def test_engine_config_devices_must_be_one_gpu(devices):
    with pytest.raises(ValueError, match="devices is "):
        TurbomindEngineConfig(devices=devices)


def test_engine_config_rejects_contradicting_device_options():
    with pytest.raises(ValueError, match="several GPUs are not supported"):
        TurbomindEngineConfig(devices=[0, 1])
    with pytest.raises(ValueError, match="cannot be used with device_type cpu"):
        TurbomindEngineConfig(devices=[0], device_type="cpu")
    for options in ({"device_type": "cuda"}, {"devices": [0]}):
        with pytest.raises(ValueError, match="exact is not supported on CUDA"):
            TurbomindEngineConfig(exact=True, **options)
    assert not TurbomindEngineConfig(exact=True).needs_cuda


@pytest.mark.parametrize(
    ("policy", "gpu", "mode"),
    [("fp4", 90, "mxfp4"), ("fp4", 100, "nvfp4"), ("nvfp4", 90, "nvfp4"), (16, 86, "mxfp4")],
)
def test_resolve_kv_options_fp4_depends_on_the_gpu(policy, gpu, mode):
    config = TurbomindEngineConfig(quant_policy=policy)
    options = resolve_kv_options(config, [0, 0], capability=_turbomind.cuda_capability(gpu))
    assert options.format == mode
    asked = str(policy) in ("fp4", "16")
    assert bool(options.note) == (asked and mode == "mxfp4")
    assert "nvfp4 is more accurate" in options.note or not options.note


def test_resolve_kv_options_rejects_too_old_gpu():
    config = TurbomindEngineConfig(quant_policy="nvfp4", strict_arch=True)
    gpu = _turbomind.cuda_capability
    with pytest.raises(ValueError, match=r"is SM 90\. It must be SM 100 .*strict_arch=True"):
        resolve_kv_options(config, [0], capability=gpu(90))
    assert resolve_kv_options(config, [0], capability=gpu(100)).format == "nvfp4"
    with pytest.raises(ValueError, match="SM 75"):
        resolve_kv_options(TurbomindEngineConfig(quant_policy=16), [0], capability=gpu(75))


@pytest.mark.parametrize(
    ("policy", "gpu", "warns"),
    [
        *(("nvfp4", gpu, True) for gpu in (80, 86, 89, 90)),
        ("k=fp8,v=nvfp4", 90, True),
        ("nvfp4", 100, False),
        ("nvfp4", None, False),  # the CPU has its own vector code
        ("fp4", 90, False),  # resolves to mxfp4, which the start line reports
        ("mxfp4", 90, False),
        ("fp8", 80, False),
    ],
)
def test_engine_config_of_nvfp4_in_software_logs_one_warning(caplog, policy, gpu, warns):
    config = TurbomindEngineConfig(kv_cache_format=policy, session_len=128)
    capability = None if gpu is None else _turbomind.cuda_capability(gpu)
    with caplog.at_level("WARNING", logger="lmdeploy"):
        engine_config_of(config, model_config(), model_path="", capability=capability)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warns
    assert all(f"nvfp4: SM {gpu} has no FP4 instructions" in text for text in texts)


def model_config():
    """Return the config of a small model."""
    config = _turbomind.ModelConfig()
    config.num_layers, config.hidden_size, config.intermediate_size = 2, 64, 128
    config.num_heads, config.num_kv_heads, config.head_dim = 2, 1, 64
    config.vocab_size, config.max_position, config.windows = 256, 2048, [0, 0]
    config.dtype = "bfloat16"
    rope = _turbomind.RopeConfig()
    rope.dim = 64
    config.ropes = [rope]
    return config


def test_plan_memory_gpu_uses_the_whole_budget():
    model = model_config()
    config = TurbomindEngineConfig(session_len=256, max_batch_size=1)
    gpu = _turbomind.cuda_capability(90)
    engine_config, _ = engine_config_of(config, model, model_path="", capability=gpu)
    cpu = _turbomind.plan_memory(model, engine_config, 1 << 30)
    cuda = _turbomind.plan_memory(model, engine_config, 1 << 30, gpu)
    assert cpu.reserved_bytes < cuda.reserved_bytes <= 0.8 * (1 << 30)
    engine_config, _ = engine_config_of(
        TurbomindEngineConfig(), model, model_path="", capability=gpu
    )
    assert engine_config.max_batch_size == 128


@pytest.mark.parametrize(
    ("algorithm", "gpu", "num_draft_tokens"),
    [(None, None, 8), (None, 90, 0), ("ngram", 90, 8), ("none", None, 0)],
)
def test_drafts_are_on_by_default_only_on_the_cpu(algorithm, gpu, num_draft_tokens):
    config = TurbomindEngineConfig(speculative_algorithm=algorithm)
    capability = None if gpu is None else _turbomind.cuda_capability(gpu)
    engine_config, _ = engine_config_of(
        config, model_config(), model_path="", capability=capability
    )
    assert engine_config.num_draft_tokens == num_draft_tokens


def test_cuda_devices_listed_and_open_gpu_have_same_capability(shim):
    code = """
from lmdeploy import _turbomind
listed, device = _turbomind.cuda_devices()[0][0], _turbomind.make_cuda_device(0)
for capability in (listed.capability, device.capability):
    print(capability.generation, capability.default_batch_size, capability.default_step_tokens)
    print(capability.reserves_lazily, capability.reads_mapped_files, capability.has_fp32)
"""
    assert run(code, shim).splitlines() == ["SM 90 128 8192", "False False False"] * 2


def test_make_device_unknown_name_is_rejected():
    with pytest.raises(_turbomind.InvalidArgument, match=r'device_type is "nova".*--device'):
        _turbomind.make_device("nova", 1)


def test_check_env_without_a_gpu_lists_software_formats(capsys):
    assert main(["check_env"]) == 0
    text = capsys.readouterr().out
    assert f"device: CUDA is not used: {VARIABLE}: " in text
    for name in reported_formats()[1:]:
        assert re.search(rf"^  {name} +software$", text, re.M)
    assert re.search(r"^  none +not needed$", text, re.M)
    assert re.search(r"^  fp4 means +nvfp4$", text, re.M)


def test_kv_formats_table_has_a_column_per_device(monkeypatch):
    class Gpu:
        def __init__(self, generation):
            self.name, self.memory_bytes = "a GPU", 1 << 34
            self.capability = _turbomind.cuda_capability(generation)

    gpus = [Gpu(75), Gpu(86), Gpu(90), Gpu(120)]
    monkeypatch.setattr(_turbomind, "cuda_devices", lambda: (gpus, ""))
    rows = {line[:12].strip(): line[12:].split() for line in check_env.kv_formats()}
    software, hardware = "software", "hardware"
    assert rows["int4"] == [software, "unsupported", software, software, software]
    assert rows["fp8"] == [software, "unsupported", software, hardware, hardware]
    assert rows["nvfp4"] == [software, "unsupported", software, software, hardware]
    assert rows["fp4 means"] == ["nvfp4", "unsupported", "mxfp4", "mxfp4", "nvfp4"]


def test_check_env_runs_without_a_driver():
    """Use the library that is installed with the package, if any."""
    code = "import lmdeploy; from lmdeploy.cli.check_env import run_check_env; run_check_env(None)"
    text = run(code, None)
    assert "engine: built" in text and re.search(
        r"^device: (CUDA is not used: \S|GPU 0)", text, re.M
    )


def test_check_env_with_a_gpu_reports_it(shim):
    code = "from lmdeploy.cli.check_env import *; print('\\n'.join([*gpus(), *kv_formats()]))"
    text = run(code, shim)
    assert re.match(r"device: GPU 0, \S+, SM 90, 4\.0 GiB, 4\.0 GiB free", text)
    assert re.search(r"^  fp4 means +nvfp4 +mxfp4$", text, re.M)


def test_open_device_missing_gpu_raises_value_error(shim):
    code = """
from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.devices import open_device
try:
    open_device(TurbomindEngineConfig(devices=[7]))
except ValueError as error:
    print(error)
"""
    assert run(code, shim).startswith("GPU 7 does not exist. Use 0 to 0")


def test_open_device_gpu_limits_cpu_threads(shim):
    code = """
import sys
from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine import devices
devices.usable_cores = lambda: int(sys.argv[1])
asked = int(sys.argv[2]) or None
print(devices.device_line(devices.open_device(TurbomindEngineConfig(num_threads=asked))))
"""
    for cores, asked, threads in ((5, 0, "5 threads"), (99, 0, "16 threads"), (5, 1, "1 thread")):
        assert f"sm 90, {threads});" in run(code, shim, str(cores), str(asked))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Return the path of a tiny Llama."""
    model = make_model(TinyModel("llama", "Llama"))
    return str(save_model(model, tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(("policy", "mode"), [("none", "none"), ("fp4", "mxfp4")])
def test_pipeline_on_a_gpu_gives_logits_of_the_cpu(shim, checkpoint, policy, mode):
    ask = (policy, "16", QUESTION)
    lines, tokens, logits = json.loads(run(ANSWER, shim, checkpoint, "auto", *ask))
    assert "cuda" in lines[0] and f"KV cache: format {mode}" in lines[1]
    assert ("nvfp4 is more accurate" in lines[1]) == (policy == "fp4")
    wanted = json.loads(run(ANSWER, os.devnull, checkpoint, "cpu", mode, *ask[1:]))
    assert wanted[0][0].startswith("device: cpu") and len(tokens) == len(wanted[1]) == 4
    error = np.subtract(logits[0], wanted[2][0])
    bound = LOGIT_TOLERANCE * np.std(wanted[2][0])
    if mode == "none":
        assert np.abs(error).max() < bound
    else:  # single values may differ more: values next to a midpoint get other codes
        plain = json.loads(run(ANSWER, os.devnull, checkpoint, "cpu", "none", *ask[1:]))
        assert np.std(error) < bound < np.std(np.subtract(logits[0], plain[2][0]))


def test_pipeline_on_a_gpu_runs_heads_of_512_values(shim, tmp_path):
    # Heads as in real checkpoints of Gemma 4: 512 values in full attention, 256 in windows.
    tiny = next(tiny for tiny in GEMMA4_MODELS if tiny.name == "gemma4-dim512")
    ask = (str(save_model(make_model(tiny), tmp_path)), "cuda", "none", "16", QUESTION)
    lines, tokens, logits = json.loads(run(ANSWER, shim, *ask))
    assert "cuda" in lines[0] and len(tokens) == 4
    wanted = json.loads(run(ANSWER, os.devnull, ask[0], "cpu", *ask[2:]))
    error = np.abs(np.subtract(logits[0], wanted[2][0])).max()
    assert 0 < error < LOGIT_TOLERANCE * np.std(wanted[2][0])


def test_cublas_lt_files_finds_libraries_of_wheels(tmp_path, monkeypatch):
    assert all(Path(file).is_file() for file in devices.cublas_lt_files())
    files = [tmp_path / "nvidia" / name for name in ("cu13", "cublas")]
    files = [folder / f"lib/libcublasLt.so.{n}" for folder, n in zip(files, (13, 12), strict=True)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("a library")
    (tmp_path / "nvidia" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert devices.cublas_lt_files() == [str(file) for file in files]
    files[0].unlink()
    assert devices.cublas_lt_files() == [str(files[1])]
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    assert devices.cublas_lt_files() == []


GEMM_BACKEND = """
import sys
from lmdeploy import _turbomind
device = _turbomind.make_cuda_device(0, sys.argv[1] == "deterministic", cublas_lt=sys.argv[2:])
print(device.gemm_backend)
"""


def test_gemm_backend_reports_the_library_or_our_kernels(shim, tmp_path):
    # The shim loads a stand-in for cuBLASLt only if it is named.
    stand_in = shim.with_name("libcuda_shim_cublas_lt.so")
    own = "own kernels ({})".format
    assert run(GEMM_BACKEND, shim, "", str(stand_in)) == own("no library was given")
    assert run(GEMM_BACKEND, shim, "", cublas_lt=stand_in) == "cuBLASLt 13.1"
    assert run(GEMM_BACKEND, shim, "deterministic", cublas_lt=stand_in) == own("deterministic")
    assert run(GEMM_BACKEND, shim, "", cublas_lt="none") == own("cannot find none")
    text = "from lmdeploy.cli.check_env import gpus; print(next(gpus()))"
    assert run(text, shim, cublas_lt=stand_in).endswith("; matrix multiplication: cuBLASLt 13.1")


def test_pipeline_with_cublas_lt_gives_logits_of_our_kernels(shim, checkpoint):
    # The steps have up to 80 rows, more than one tile of our own kernels.
    ask = (checkpoint, "cuda", "none", "80", QUESTION * 4)
    stand_in = shim.with_name("libcuda_shim_cublas_lt.so")
    lines, _, logits = json.loads(run(ANSWER, shim, *ask, cublas_lt=stand_in))
    assert lines[0].endswith("; matrix multiplication: cuBLASLt 13.1")
    lines, _, wanted = json.loads(run(ANSWER, shim, *ask))
    assert "own kernels" in lines[0]
    error = np.abs(np.subtract(logits[0], wanted[0])).max()
    assert 0 < error < LOGIT_TOLERANCE * np.std(wanted[0])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "flag"), [(112, "bfloat16", "--device cpu"), (64, "float32", "--dtype")]
)
def test_load_engine_model_without_kernels_is_rejected_before_loading(
    shim, tmp_path, head_dim, dtype, flag
):
    model = make_model(TinyModel("llama", "Llama", {"head_dim": head_dim}))
    path = str(save_model(model, tmp_path))
    assert re.search(f"is not supported on a GPU.*Use {flag}", run(REFUSED, shim, path, dtype))
    assert run(REFUSED, os.devnull, path, dtype) == "weights are read"
