"""Tests of tuning at the start of an engine, with a device that answers from a script.

The last ones tune the CUDA backend compiled for the CPU, as test_devices.py runs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import TinyModel, make_model, save_model

from lmdeploy._turbomind import TunedChoice
from lmdeploy.base import tuner_file
from lmdeploy.engine import devices

ROOT = Path(__file__).parents[3]
MACHINE = "GPU, SM 90, driver 1"


def choice(question: str, kernel: str = "tile", us: float = 2.0) -> TunedChoice:
    """Return a choice whose table has the kernel `tile`, which takes 4 µs."""
    return TunedChoice(question=question, kernel=kernel, table_kernel="tile", us=us, table_us=4.0)


class FakeDevice:
    """A device with three questions. It measures those that `saved` does not answer."""

    def __init__(self, machine: str = MACHINE) -> None:
        self.machine = machine
        self.measured: list[str] = []
        self.left: list[str] = []
        self.wrong: list[str] = []
        self.max_rows = 0

    def tune(
        self,
        models: list[Any],
        *,
        saved: list[TunedChoice],
        max_rows: int,
        max_seconds: float,
        **_attention: Any,
    ) -> Any:
        known = {x.question: x for x in saved}
        choices, measured = [], 0
        for question in ("a", "b", "c") if models else ():
            if question in known:
                choices.append(known[question])
            elif question not in self.left:
                choices.append(choice(question, "library" if question == "b" else "tile"))
                self.measured.append(question)
                measured += 1
        self.max_rows = max_rows
        left = len(self.left) if models else 0
        return SimpleNamespace(
            machine=self.machine,
            choices=choices,
            num_measured=measured,
            num_left=left,
            wrong=self.wrong,
        )


def tune(device: FakeDevice) -> str:
    """Return the line of the start."""
    return devices.tune_device(device, ["a model"], max_rows=512)  # type: ignore[arg-type, list-item]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of MACHINE in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(tuner_file.SWITCH, "1")
    return tmp_path / "lmdeploy" / "tuner" / "gpu.json"


def test_tune_device_measures_once(path: Path) -> None:
    device = FakeDevice()
    gain = "1 differ from the table, at most 2.00 times as fast (b: library)"
    assert re.fullmatch(rf"tuner: 3 choices measured in \d\.\d s; {re.escape(gain)}", tune(device))
    assert device.measured == ["a", "b", "c"] and device.max_rows == 512
    assert tune(FakeDevice()) == f"tuner: 3 choices from {path}; {gain}"
    other = FakeDevice()
    tune(other)
    assert other.measured == []


def test_tune_device_measures_what_the_file_lacks(path: Path) -> None:
    tuner_file.write_choices(path, MACHINE, choices=[choice("c"), choice("of another model")])
    device = FakeDevice()
    device.left = ["a"]
    line = tune(device)
    assert line.startswith("tuner: 1 of 2 choices measured in ") and line.endswith(
        "; 1 not measured"
    )
    stored = tuner_file.read_choices(path, MACHINE)
    assert [x.question for x in stored] == ["of another model", "b", "c"]


def test_tune_device_names_a_kernel_with_wrong_results(path: Path) -> None:
    device = FakeDevice()
    device.wrong = ["wide for a", "wide for b"]
    assert tune(device).endswith("; 2 left out for wrong results (wide for a)")


def test_tune_device_keeps_what_another_process_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FakeDevice):
        def tune(self, models: list[Any], **options: Any) -> Any:
            if models:
                tuner_file.write_choices(
                    path, MACHINE, choices=[choice("of a process beside this one")]
                )
            return super().tune(models, **options)

    tune(Slow())
    stored = {x.question for x in tuner_file.read_choices(path, MACHINE)}
    assert stored == {"of a process beside this one", "a", "b", "c"}


@pytest.mark.parametrize("damage", ["truncated", "other machine", "folder"])
def test_tune_device_bad_file_is_one_line_and_measured_again(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tune(FakeDevice())
    device = FakeDevice("GPU, SM 90, driver 2" if damage == "other machine" else MACHINE)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    caplog.clear()
    line = tune(device)
    assert line.startswith("tuner: 3 choices measured") and device.measured == ["a", "b", "c"]
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith(f"The GPU is tuned again: {path}: ") and "\n" not in texts[0]
    assert len(texts) == (2 if damage == "folder" else 1)  # a folder cannot be replaced either
    if damage != "folder":
        assert len(tuner_file.read_choices(path, device.machine)) == 3


def test_tune_device_without_a_writable_folder_logs_one_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("a file in the place of the folder")
    assert tune(FakeDevice()).startswith("tuner: 3 choices measured")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"The tuner's choices are not stored in {path.parent}: ")


def test_tune_device_that_has_no_choices_does_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice("")
    assert tune(device) == "" and device.measured == []
    monkeypatch.setenv(tuner_file.SWITCH, "0")
    device = FakeDevice()
    assert tune(device) == "" and device.measured == []
    assert not path.exists()


# Arguments: checkpoint, deterministic.
START = """
import json, sys
from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline
from lmdeploy.engine import devices
devices._MAX_TUNING_SECONDS = 1e9  # the CPU takes seconds for what takes milliseconds on a GPU
config = TurbomindEngineConfig(
    device_type="cuda", session_len=128, max_batch_size=2, max_prefill_token_num=2,
    cache_max_entry_count=0.01, num_threads=1, kv_quality="raw", deterministic=sys.argv[2] == "1",
)
with pipeline(sys.argv[1], backend_config=config) as pipe:
    gen = GenerationConfig(max_new_tokens=4, ignore_eos=True)
    answer = pipe("What is this?", gen_config=gen, do_preprocess=False)
    print(json.dumps([pipe.engine.start_lines(), answer.token_ids]))
"""
CHECK_ENV = "from lmdeploy.cli.check_env import gpus; print(list(gpus())[1])"


def run(code: str, shim: Path, *args: str) -> str:
    """Run code in a subprocess with the shim and a stand-in for cuBLASLt. Return its output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LMDEPLOY_CUDA_LIBRARY": str(shim)}
    env["LMDEPLOY_CUBLASLT_LIBRARY"] = str(shim.with_name("libcuda_shim_cublas_lt.so"))
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_engine_on_a_gpu_is_tuned_at_its_first_start(shim: Path, path: Path) -> None:
    model = str(save_model(make_model(TinyModel("llama", "Llama")), path.parents[2] / "tiny"))
    path = path.with_name("shim.json")
    assert run(CHECK_ENV, shim) == f"tuner of GPU 0: no {path} yet; the first start of a model " + (
        "writes it"
    )
    lines, tokens = json.loads(run(START, shim, model, "0"))
    assert re.match(r"tuner: \d+ choices measured in ", lines[1])
    stored = json.loads(path.read_text())
    assert re.fullmatch(
        r"shim, SM 90, driver shim, cuBLASLt 130102, kernels \S+ [0-9a-f]{12}", stored["machine"]
    )
    questions = [row["question"] for row in stored["choices"]]
    count = len(questions)
    if "; 1 not measured" not in lines[1]:  # the machine may be too slow for the last question
        assert re.fullmatch(
            r"decode attention, K none V none \w+, head_dim \d+, 4 heads over 2, blocks of 64, "
            "from 1 sequence",
            questions.pop(),
        )
    assert len(set(questions)) == len(questions) == 2 * 5 + 2  # and about prompts and launches
    assert questions.pop() == "a chain of launches, 1 row"
    assert questions.pop() == "prefill attention, fp16, head_dim 64, many rows"
    layer = r"(norm, )?bf16 [0-9+]+ x \d+(, gate)?, [12] rows?"
    assert all(re.fullmatch(layer, text) for text in questions)
    assert re.fullmatch(
        rf"tuner of GPU 0: {path}, {count} choices, 0.0 days old", run(CHECK_ENV, shim)
    )
    lines, again = json.loads(run(START, shim, model, "0"))
    assert lines[1].startswith(f"tuner: {count} choices from {path}") and again == tokens
    lines, _ = json.loads(run(START, shim, model, "1"))
    assert not any(line.startswith("tuner") for line in lines)
