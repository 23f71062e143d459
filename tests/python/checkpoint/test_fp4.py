"""Tests of dense NVFP4 and MXFP4: compressed-tensors, ModelOpt and GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from quantized_folders import (
    Stored,
    change_config,
    change_tensors,
    check_hybrid,
    save_quantized,
)
from reference.floats import E2M1_MAGNITUDES, E4M3_MAGNITUDES, nearest_code
from reference.weights import read_mxfp4, read_nvfp4
from safetensors.torch import load_file, save_file
from tiny_engine import model_config
from tiny_families import HYBRID_MODELS
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, TinyModel, make_model
from tiny_moe import QWEN3_MOE

from lmdeploy import _turbomind
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint import fingerprint
from lmdeploy.checkpoint import load as weight_loader
from lmdeploy.checkpoint.convert import (
    check_exponents,
    engine_bytes,
    engine_format,
    for_device,
    matrix_for_engine,
    scales_for_engine,
)
from lmdeploy.checkpoint.files.tensor_file import SPLIT_MXFP4, StoredTensor
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.engine.model_files import open_files

LLAMA = TinyModel("llama-256", "Llama", {"hidden_size": 256, "intermediate_size": 512})
ODD = TINY_MODELS[0]  # its down projection has 160 inputs, which are 2.5 blocks of NVFP4
UP = "model.layers.0.mlp.up_proj."
# Activations of 16 bits and the FP16 cache give 1.5e-7 to 6e-7. A head in BF16, which rounds its
# activations to BF16, gives 4.0e-6. Conversion to Q8_0 gives 8.0e-5. Hybrid models give 1.0e-5
# without conversion and 2.4e-4 with it.
MAX_SERVED_KL = 2e-6
MAX_KL_WITH_BF16_HEAD = 8e-6
MAX_CONVERTED_KL = 3e-4
TILE_ROWS = 16


@dataclass(frozen=True)
class Fp4:
    """One form of a folder: its config, and the names of its tensors."""

    config: dict[str, Any]
    codes: str
    number: str  # empty for MXFP4

    @property
    def divides(self) -> bool:
        """Return whether scales are divided by the number."""
        return self.number == "weight_global_scale"

    def quantize(self, weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        """Quantize a matrix whose codes include -0, 6 and -6, and one group of zeros."""
        weight = weight.copy()
        weight[0, :32] = 0.0
        parts = self._mx(weight) if not self.number else self._nv(weight)
        parts |= {"input_scale": torch.tensor(0.5)} if self.codes == "weight" else {}
        return parts, self.read(parts)

    def _nv(self, weight: np.ndarray) -> Stored:
        groups = weight.reshape(len(weight), -1, 16)
        largest = np.abs(groups).max(axis=2)
        number = np.float32(2688 / largest.max())  # 6 · 448
        scales = nearest_code(largest * number / 6, E4M3_MAGNITUDES[:0x7F])
        if self.codes == "weight":
            number = np.float32(1 / number)
        return {
            self.codes: torch.from_numpy(self._codes(groups, largest / 6)),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            self.number: torch.tensor(number).reshape(() if self.codes == "weight" else (1,)),
        }

    def _mx(self, weight: np.ndarray) -> Stored:
        groups = weight.reshape(len(weight), -1, 32)
        largest = np.abs(groups).max(axis=2)
        exponents = np.floor(np.log2(np.maximum(largest, 1e-30))) - 2
        codes = self._codes(groups, np.exp2(exponents))
        scales = (exponents + 127).clip(0, 254).astype(np.uint8)
        return {self.codes: torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}

    def _codes(self, groups: np.ndarray, steps: np.ndarray) -> np.ndarray:
        steps = np.maximum(steps, 1e-30).astype(np.float32)[:, :, None]
        signs = np.where(np.signbit(groups), 8, 0)
        codes = nearest_code((groups / steps).astype(np.float32), E2M1_MAGNITUDES) | signs
        codes = codes.reshape(len(groups), -1).astype(np.uint8)
        return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)

    def read(self, parts: Stored) -> np.ndarray:
        """Return the values of a matrix as the independent reader sees them."""
        codes = parts[self.codes].numpy()
        scales = parts["weight_scale"].view(torch.uint8).numpy()
        if not self.number:
            return read_mxfp4(codes, scales)
        return read_nvfp4(codes, scales, parts[self.number].numpy(), divides=self.divides)

    def read_with_package(self, parts: Stored) -> np.ndarray:
        """Return the values in FP32 as the package compressed-tensors sees them."""
        args = QuantizationArgs(**self.config["config_groups"]["group_0"]["weights"])
        name = self.config["format"]
        rows, half = parts[self.codes].shape
        compressor: Any = BaseCompressor.get_value_from_registry(name)
        return dequantize(
            x_q=unpack_fp4_from_uint8(parts[self.codes], rows, 2 * half, torch.float32),
            scale=compressor._decompress_scale(parts["weight_scale"], torch.float32),
            args=args,
            global_scale=parts.get(self.number),
            dtype=torch.float32,
        ).numpy()


def compressed(kind: str, strategy: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size}
    if kind == "mxfp4":
        weights["scale_dtype"] = "torch.uint8"
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}
    QuantizationScheme(**group)  # the package accepts it
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": {"group_0": {**group, "input_activations": {**weights, "dynamic": True}}},
        "ignore": ["lm_head"],
    }


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    "ignore": ["lm_head"],
}
FORMS = {
    "nvfp4": Fp4(compressed("nvfp4", "tensor_group", 16), "weight_packed", "weight_global_scale"),
    "mxfp4": Fp4(compressed("mxfp4", "group", 32), "weight_packed", ""),
    "modelopt": Fp4(MODELOPT, "weight", "weight_scale_2"),
}


def save_fp4(tiny: TinyModel, folder: Path, form: Fp4) -> Any:
    folder.mkdir(exist_ok=True)
    return save_quantized(tiny, folder, form.quantize, quantization=form.config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("fp4")
    for name, form in FORMS.items():
        save_fp4(LLAMA, base / name, form)
    return {name: base / name for name in FORMS}


def planned_up(folder: Path) -> PlannedTensor:
    (planned,) = [p for p in open_checkpoint(folder).tensors if p.name == "layers.0.up"]
    return planned


def as_stored(planned: PlannedTensor) -> StoredTensor:
    return replace(planned.tensor, as_stored=True)


def pack(tensor: StoredTensor, *, exact: bool) -> tuple[str, np.ndarray]:
    """Return the format and the FP32 values or the tiles of a matrix that the engine packed."""
    config = model_config()
    rows, cols = tensor.shape
    config.hidden_size, config.intermediate_size = cols, rows
    builder = _turbomind.WeightsBuilder(config, _turbomind.make_cpu_device(1), exact)
    kind, data = matrix_for_engine(tensor, exact=False)
    scales = scales_for_engine(tensor, kind)
    builder.add_matrix("layers.0.up", kind, data, rows, cols, scales)
    packed = builder.packed()["layers.0.up"]
    if not exact:
        return packed[0], packed[3]
    values = packed[3].view(np.float32).reshape(-1, cols, TILE_ROWS).swapaxes(1, 2)
    return packed[0], values.reshape(-1, cols)[:rows]


@pytest.mark.parametrize("name", FORMS)
def test_fp4_matrices_equal_the_package_and_the_independent_reader(
    name: str, folders: dict[str, Path]
) -> None:
    form = FORMS[name]
    stored = load_file(folders[name] / "model.safetensors")
    parts = {n.removeprefix(UP): data for n, data in stored.items() if n.startswith(UP)}
    wanted = form.read(parts)
    assert len(np.unique(wanted)) > 20
    if name != "modelopt":
        np.testing.assert_array_equal(form.read_with_package(parts), wanted)
    tensor = as_stored(planned_up(folders[name]))
    kind, values = matrix_for_engine(tensor, exact=True)
    assert kind == "f32"
    np.testing.assert_array_equal(values, wanted)
    if name == "mxfp4":
        np.testing.assert_array_equal(pack(tensor, exact=True)[1], wanted)
        return
    kind, blocks = matrix_for_engine(tensor, exact=False)
    assert (kind, blocks.nbytes) == ("nvfp4", tensor.rows * tensor.cols * 9 // 16)
    got = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4) * tensor.factor
    if form.divides:  # the factor is rounded, and so is the quotient in `wanted`
        np.testing.assert_allclose(got, wanted, rtol=2**-22)
    else:
        np.testing.assert_allclose(got, wanted, rtol=2**-23)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt"])
def test_fp4_without_kernels_becomes_q8_0(name: str, folders: dict[str, Path]) -> None:
    planned = planned_up(folders[name])
    wanted = matrix_for_engine(planned.tensor, exact=True)[1]
    kind, blocks = matrix_for_engine(planned.tensor, exact=False)
    assert (kind, blocks.nbytes) == ("q8_0", engine_bytes(planned, exact=False))
    got = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    largest = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True)
    error = np.abs(got - wanted).reshape(-1, 32)
    assert (error <= largest / 254 * (1 + 2**-9) + 2**-25).all()


def test_add_matrix_nvfp4_keeps_the_bits_of_the_file(folders: dict[str, Path]) -> None:
    tensor = as_stored(planned_up(folders["modelopt"]))
    stored, tiles = pack(tensor, exact=False)
    assert (stored, tiles.nbytes) == ("nvfp4", tensor.num_bytes - 4 + 4 * tensor.rows)
    # The values of the engine are those of the file, with one rounding.
    values = pack(tensor, exact=True)[1]
    np.testing.assert_array_equal(values, matrix_for_engine(tensor, exact=True)[1])
    assert _turbomind.packed_bytes("nvfp4", 2048, 2048) <= 1.02 * 2048 * 2048 * 9 / 16


@pytest.mark.parametrize("tiny", [LLAMA, ODD, QWEN3_MOE], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("name", FORMS)
def test_fp4_exact_logits_equal_transformers(name: str, tiny: TinyModel, tmp_path: Path) -> None:
    model = save_fp4(tiny, tmp_path / "m", FORMS[name])
    ids = prompt(80)
    with EngineRun(str(tmp_path / "m"), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{tiny.name} {name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tiny", HYBRID_MODELS, ids=lambda tiny: tiny.name)
def test_fp4_hybrid_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    check_hybrid(tiny, tmp_path, form.quantize, quantization=form.config)


def round_embedding(model: Any, folder: Path) -> None:
    """Round the embedding and the head to BF16, the format in which the engine keeps them."""
    stored = {name: data.clone() for name, data in load_file(folder / "model.safetensors").items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.copy_(parameter.bfloat16())
                if name in stored:
                    stored[name] = stored[name].bfloat16()
    save_file(stored, folder / "model.safetensors")


def divergence(wanted: np.ndarray, logits: np.ndarray) -> float:
    log_p, log_q = (torch.log_softmax(torch.tensor(x).double(), -1) for x in (wanted, logits))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("tiny", [LLAMA, ODD, QWEN3_MOE, *HYBRID_MODELS], ids=lambda x: x.name)
@pytest.mark.parametrize("name", FORMS)
def test_fp4_served_logits_differ_only_by_activations(
    name: str, tiny: TinyModel, tmp_path: Path
) -> None:
    model = save_fp4(tiny, tmp_path / "m", FORMS[name])
    round_embedding(model, tmp_path / "m")
    wanted = reference_logits(model, prompt(80))
    with EngineRun(str(tmp_path / "m"), exact=False, kv_format="none") as run:
        kl = divergence(wanted, run.logits(prompt(80)))
    print(f"{tiny.name} {name}: KL {kl:.2e}")
    is_kept = tiny is LLAMA or (name == "mxfp4" and tiny not in HYBRID_MODELS)
    assert kl <= (MAX_KL_WITH_BF16_HEAD if is_kept else MAX_CONVERTED_KL)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_gguf_fp4_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = make_model(LLAMA)
    stored = write_gguf(model, path, weight_format=kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored[name]))
    wanted = reference_logits(model, prompt(80))
    with EngineRun(str(path), exact=True) as run:
        assert relative_error(run.logits(prompt(80)), wanted) <= MAX_RELATIVE_ERROR
    with EngineRun(str(path), exact=False, kv_format="none") as run:
        kl = divergence(wanted, run.logits(prompt(80)))
    print(f"GGUF {kind}: KL {kl:.2e}")
    assert kl <= MAX_SERVED_KL


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_gguf_fp4_has_the_values_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    stored = write_gguf(make_model(LLAMA), path, weight_format=kind)
    tensors = {planned.name: planned for planned in open_checkpoint(path).tensors}
    up = as_stored(tensors["layers.0.up"])
    values = pack(up, exact=True)[1]
    np.testing.assert_array_equal(values, stored[UP + "weight"])
    # q has interleaved rows, so that it cannot be mapped. It keeps its format.
    query = tensors["layers.0.q"]
    assert (query.interleaved_heads > 0, query.mapped) == (True, False)
    assert engine_format(as_stored(query), exact=False) == kind.lower()
    assert tensors["layers.0.up"].mapped == (kind == "MXFP4")


@pytest.mark.parametrize("name", FORMS)
def test_open_files_fp4_plan_has_the_bytes_of_the_file(name: str, folders: dict[str, Path]) -> None:
    capability = _turbomind.make_cpu_device(1).capability
    info = open_files(str(folders[name]), capability=capability).info
    assert info.stored_dtype == "quantized"
    if name == "mxfp4":
        assert info.parts["mlp"].formats == ("mxfp4",)
        assert info.mapped_bytes > 0
    else:
        assert info.parts["mlp"].formats == ("nvfp4",)
        numbers = 4 * 2 * 3  # the bytes of the factors of two layers
        stored = [
            planned.tensor.num_bytes
            for planned in open_checkpoint(folders[name]).tensors
            if planned.name.endswith((".gate", ".up", ".down"))
        ]
        assert info.parts["mlp"].num_bytes == sum(stored) - numbers
    others = open_files(str(folders[name]), capability=_turbomind.cuda_capability(90)).info
    assert others.parts["mlp"] == info.parts["mlp"]
    others = open_files(str(folders[name]), capability=_turbomind.DeviceCapability()).info
    assert others.parts["mlp"].formats == (("mxfp4",) if name == "mxfp4" else ("q8_0",))


def test_for_device_keeps_nvfp4_of_whole_blocks_only(tmp_path: Path) -> None:
    save_fp4(ODD, tmp_path / "m", FORMS["nvfp4"])
    capability = _turbomind.make_cpu_device(1).capability
    tensors = for_device(open_checkpoint(tmp_path / "m"), capability).tensors
    formats = {planned.name: engine_format(planned.tensor, exact=False) for planned in tensors}
    assert formats["layers.0.up"] == "nvfp4"
    assert formats["layers.0.down"] == "q8_0"


@pytest.mark.parametrize("name", FORMS)
def test_weight_cache_fp4_second_start_gives_equal_bits(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    logits = []
    for is_cached in (False, True):
        with EngineRun(str(folders[name]), exact=False) as run:
            logits.append(run.logits(prompt(40)))
            writer = run.model.cache_writer
            assert (writer is None) == is_cached
            if writer is not None:
                writer.start()
                assert writer.join(60.0) and writer.stored
    np.testing.assert_array_equal(logits[0], logits[1])


def test_hash_model_covers_every_part(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, form in FORMS.items():
        seen = {fingerprint.hash_model(str(folders[name]))}
        for part in filter(None, (form.codes, "weight_scale", form.number)):
            target = tmp_path / f"{name}-{part}"
            target.mkdir()

            def change(stored: Stored, key: str = UP + part) -> None:
                stored[key] = stored[key] * 2 if stored[key].numel() == 1 else stored[key].flip(0)

            seen.add(fingerprint.hash_model(str(change_tensors(folders[name], target, change))))
        assert len(seen) == (4 if form.number else 3)


def test_stored_tensor_take_of_mxfp4_takes_its_scales() -> None:
    codes, scales = np.arange(128, dtype=np.uint8), np.arange(8, dtype=np.uint8)
    tensor = StoredTensor("x", SPLIT_MXFP4, (8, 32), codes, scales)
    part = tensor.take(2, 4)
    np.testing.assert_array_equal(part.raw, codes[32:96])
    assert part.scales is not None
    np.testing.assert_array_equal(part.scales, scales[2:6])


def test_stored_tensor_take_of_groups_takes_rows_of_each() -> None:
    codes, scales = np.arange(128, dtype=np.uint8), np.arange(8, dtype=np.uint8)
    tensor = StoredTensor("x", SPLIT_MXFP4, (8, 32), codes, scales)
    part = tensor.take(1, 2, groups=2)
    assert part.shape == (4, 32)
    np.testing.assert_array_equal(part.bytes_by_row(), codes.reshape(8, 16)[[1, 2, 5, 6]])
    rows = part.scales_by_row()
    assert rows is not None
    assert rows.reshape(-1).tolist() == [1, 2, 5, 6]
    planned = PlannedTensor("layers.0.q", part)
    assert engine_bytes(planned, exact=False) == 4 * 17  # not those of the whole matrix


def test_scales_for_engine_follow_reordered_rows() -> None:
    codes, scales = np.zeros(128, np.uint8), np.arange(8, dtype=np.uint8)
    tensor = StoredTensor("x", SPLIT_MXFP4, (8, 32), codes, scales)
    got = scales_for_engine(tensor, "mxfp4_split", interleaved_heads=2)
    assert got is not None
    assert got.reshape(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_modelopt_config_in_a_file_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    change_tensors(folders["modelopt"], tmp_path, lambda stored: None)
    change_config(tmp_path, quantization_config=None)
    own = tmp_path / "hf_quant_config.json"
    values = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    own.write_text(json.dumps({"quantization": {**values, "exclude_modules": ["lm_head"]}}))
    wanted = fingerprint.hash_model(str(folders["modelopt"]))
    assert fingerprint.hash_model(str(tmp_path)) == wanted
    own.write_text(json.dumps({"quantization": {**values, "group_size": 32}}))
    with pytest.raises(ModelFormatError, match=r"group_size is 32 for NVFP4. It must be 16"):
        open_checkpoint(tmp_path)
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    own.write_text(json.dumps({"quantization": mixed}))
    assert fingerprint.hash_model(str(tmp_path)) == wanted
    layers["x"] = {"quant_algo": "W4A8_AWQ"}
    own.write_text(json.dumps({"quantization": mixed}))
    with pytest.raises(ModelFormatError, match=r"x: quant_algo is 'W4A8_AWQ'. It must be one of"):
        open_checkpoint(tmp_path)


def test_modelopt_nvfp4_folder_has_kv_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    def add(stored: Stored) -> None:
        for layer in range(2):
            for side in "kv":
                name = f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
                stored[name] = torch.tensor(0.5)

    change_tensors(folders["modelopt"], tmp_path, add)
    change_config(tmp_path, quantization_config={**MODELOPT, "kv_cache_quant_algo": "FP8"})
    scales = open_checkpoint(tmp_path).kv_scales
    assert scales is not None and scales.k == scales.v == (0.5, 0.5)


def load_all(folder: Path) -> None:
    for planned in open_checkpoint(folder).tensors:
        check_exponents(planned.tensor)
        if len(planned.tensor.shape) == 2:
            matrix_for_engine(planned.tensor, exact=False)


def put(part: str, data: torch.Tensor) -> Callable[[Stored], None]:
    return lambda stored: stored.update({UP + part: data})


def with_scale(code: int) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        stored[UP + "weight_scale"].view(torch.uint8)[3, 1] = code

    return change


CODES = torch.zeros(512, 128, dtype=torch.uint8)
SCALES = torch.ones(512, 16).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "nvfp4",
            with_scale(0x7F),
            r"up_proj.weight_packed: A scale has the E4M3 code 0x7f, which",
        ),
        ("modelopt", with_scale(0xB8), "E4M3 code 0xb8, which is NaN or negative. It must be at"),
        ("mxfp4", with_scale(255), "A scale is 255, which is NaN. It must be 0 to 254"),
        ("nvfp4", put("weight_global_scale", torch.zeros(1)), "weight_global_scale is 0. It must"),
        ("nvfp4", put("weight_global_scale", torch.tensor([-1.0])), "is -1. It must be above 0"),
        ("nvfp4", put("weight_global_scale", torch.tensor([torch.nan])), "is nan. It must be ab"),
        ("nvfp4", put("weight_global_scale", torch.tensor([torch.inf])), "is inf. It must be ab"),
        ("nvfp4", put("weight_global_scale", torch.tensor([1e-40])), "weight_global_scale is "),
        ("modelopt", put("weight_scale_2", torch.tensor(3e38)), r"is 3e\+38. It must be above 0"),
        ("modelopt", put("weight_scale_2", torch.ones(2)), r"shape \[2\]. It must have one numb"),
        ("nvfp4", put("weight_global_scale", torch.ones(1).half()), "has dtype F16. It must be"),
        ("nvfp4", lambda stored: stored.pop(UP + "weight_global_scale"), "global_scale is missing"),
        ("modelopt", lambda stored: stored.pop(UP + "weight_scale_2"), "has dtype U8. It must be"),
        ("nvfp4", put("weight_scale", SCALES[:, :8]), r"shape \[512, 8\]. It must be \[512, 16\]"),
        ("modelopt", put("weight_scale", SCALES[:511]), r"\[511, 16\]. It must be \[512, 16\]"),
        ("nvfp4", put("weight_scale", torch.ones(512, 16)), "has dtype F32. It must be one of"),
        ("modelopt", put("weight_scale", torch.ones(512, 16)), "dtype F32. It must be one of F8"),
        ("mxfp4", put("weight_scale", CODES[:, :16]), r"\[512, 16\]. It must be \[512, 8\]"),
        ("nvfp4", put("weight_packed", CODES[:, :127]), "The 254 inputs must be a multiple of 32"),
        ("mxfp4", put("weight_packed", CODES[:, :120]), "The 240 inputs must be a multiple of 32"),
        ("nvfp4", put("weight_packed", CODES.reshape(-1)), "It must have two dimensions"),
        ("nvfp4", put("weight_packed", CODES[:, :64]), r"\[512, 16\]. It must be \[512, 8\]"),
        ("mxfp4", put("weight_global_scale", torch.ones(1)), "exists, but MXFP4 has no such"),
        ("nvfp4", put("weight_zero_point", CODES), "zero_point exists, but a matrix of FP4 has"),
        ("nvfp4", put("weight_g_idx", CODES), "weight_g_idx exists, but a matrix of FP4 has no"),
        ("modelopt", put("pre_quant_scale", torch.ones(256)), "does not use 1 of the tensors"),
    ],
)
def test_open_checkpoint_inconsistent_fp4_tensor_is_rejected(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    change: Callable[[Stored], Any],
    text: str,
) -> None:
    change_tensors(folders[name], tmp_path, change)
    with pytest.raises(ModelFormatError, match=text):
        load_all(tmp_path)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"group_size": 32}, "'tensor_group' and group_size is 32 for floats of 4 bits. They must"),
        ({"strategy": "group", "group_size": 16}, "strategy is 'group' and group_size is 16"),
        ({"strategy": "channel"}, "strategy is 'channel' and group_size is 16"),
        ({"symmetric": False}, "symmetric is false for floats of 4 bits. It must be true"),
        ({"num_bits": 6}, "num_bits is 6 for type float. It must be 4 or 8"),
    ],
)
def test_open_checkpoint_unsupported_fp4_config_is_rejected(
    folders: dict[str, Path], tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    change_tensors(folders["nvfp4"], tmp_path, lambda stored: None)
    config = json.loads(json.dumps(FORMS["nvfp4"].config))
    config["config_groups"]["group_0"]["weights"].update(values)
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (np.ones(2, np.float32), r"blk.0.ffn_up.scale is F32 \[2\]. It must be F32 \[1\]"),
        (np.ones(1, np.float16), r"ffn_up.scale is F16 \[1\]. It must be F32 \[1\]"),
        (np.zeros(1, np.float32), "ffn_up.scale is 0. It must be above 0"),
        (np.full(1, np.nan, np.float32), "ffn_up.scale is nan. It must be above 0"),
    ],
)
def test_open_gguf_wrong_factor_of_nvfp4_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: np.ndarray, text: str
) -> None:
    add = gguf.GGUFWriter.add_tensor

    def add_changed(self: Any, name: str, tensor: np.ndarray, **options: Any) -> None:
        add(self, name, data if name == "blk.0.ffn_up.scale" else tensor, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_changed)
    write_gguf(make_model(LLAMA), tmp_path / "m.gguf", weight_format="NVFP4")
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path / "m.gguf")
