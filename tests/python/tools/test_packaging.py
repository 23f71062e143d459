"""Check the Dockerfile, the systemd unit, what README installs, and the wheel's script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

from lmdeploy.cli.main import make_parser
from lmdeploy.serve.state import ServerOptions

ROOT = Path(__file__).resolve().parents[3]


def unit() -> dict[str, str]:
    """Return the settings of the unit. A setting that occurs twice has its last value."""
    text = (ROOT / "packaging/lmdeploy.service").read_text("utf-8")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


def variables() -> dict[str, str]:
    """Return the variables of the unit's settings file, those in comments included."""
    text = (ROOT / "packaging/lmdeploy.env").read_text("utf-8")
    found = re.findall(r"^#?(LMDEPLOY_\w+)=(.*)$", text, re.M)
    return {name: value.strip('"') for name, value in found}


def test_image_serves_on_the_port_that_it_exposes_and_checks() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    entry = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)[-1]
    program, *flags = json.loads(entry)
    args = make_parser().parse_args([*flags, "model", "--quant-policy", "16"])
    assert program == "lmdeploy"
    assert (args.server_name, args.model_path) == ("0.0.0.0", "model")
    port = str(ServerOptions().server_port)
    assert str(args.server_port) == port
    assert re.findall(r"^EXPOSE (\d+)$", text, re.M) == [port]
    assert f"http://127.0.0.1:{port}/health" in text
    assert re.search(r"^USER [1-9]", text, re.M)


def test_unit_starts_the_server_with_flags_that_exist() -> None:
    settings, values = unit(), variables()
    command = settings["ExecStart"].replace("${LMDEPLOY_MODEL}", values["LMDEPLOY_MODEL"])
    command = command.replace("$LMDEPLOY_FLAGS", values["LMDEPLOY_FLAGS"])
    assert "$" not in command
    args = make_parser().parse_args(shlex.split(command)[1:])
    assert args.model_path == values["LMDEPLOY_MODEL"]
    assert args.api_keys is None and values["LMDEPLOY_API_KEYS"]
    assert int(settings["TimeoutStopSec"]) > args.shutdown_timeout


def test_context_of_the_image_has_what_the_build_reads() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert {"pyproject.toml", "setup.py", "CMakeLists.txt", "README.md"} <= kept
    assert {"components", "lmdeploy", "src"} <= kept


def test_readme_names_extras_and_scripts_that_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.search(r"^pip install \. ", text, re.M)
    assert (ROOT / re.findall(r"^(scripts/wheel\.sh)", text, re.M)[0]).stat().st_mode & 0o111
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    table = project.split("[project.optional-dependencies]")[1].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", table, re.M)
    named = re.search(
        r"Optional features need an extra: (.*?), as in `pip install '\.\[ray\]'`\.\n", text, re.S
    )
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == set(extras) - {"test", "eval"}


def test_wheel_script_refuses_other_values_of_tm_cuda() -> None:
    done = subprocess.run(
        [ROOT / "scripts/wheel.sh"],
        env={"TM_CUDA": "AUTO", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "wheel.sh: TM_CUDA is 'AUTO'. It must be ON or OFF.\n"
