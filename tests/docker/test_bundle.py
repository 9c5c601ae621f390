"""`make bundle` and what a host without a network makes of it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import MODEL
from tests.docker.engine import CPU_IMAGE, DOCKER, ROOT, VERSION, docker, has_image, running

pytestmark = pytest.mark.docker
NAME = f"quire-{VERSION}-cpu"


def test_a_bundle_installs_without_a_network(image: str, models: Path, tmp_path: Path) -> None:
    syft = os.environ.get("SYFT", "syft")
    if shutil.which(syft) is None:
        pytest.skip(f"there is no {syft}; make bundle installs it")
    out = tmp_path / "dist"
    command = [ROOT / "docker/bundle.sh", models / MODEL, "cpu", out]
    done = subprocess.run(command, env={**os.environ, "DOCKER": DOCKER}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == [f"{NAME}.tar", f"{NAME}.tar.sha256"]
    subprocess.run(["sha256sum", "--check", "--quiet", f"{NAME}.tar.sha256"], cwd=out, check=True)
    print(f"\n{NAME}.tar: {(out / f'{NAME}.tar').stat().st_size / 1e6:.0f} MB")

    host = tmp_path / "host"
    host.mkdir()
    subprocess.run(["tar", "-xpf", out / f"{NAME}.tar", "-C", host], check=True, umask=0o077)
    folder = host / NAME
    sbom = json.loads((folder / "sbom.spdx.json").read_text())
    packages = {package["name"]: package.get("versionInfo") for package in sbom["packages"]}
    assert sbom["spdxVersion"].startswith("SPDX-2.") and packages["quire"] == VERSION
    assert {"torch", "tokenizers", "grpcio", "libc6"} <= packages.keys()

    before = docker("image", "inspect", "--format", "{{.Id}}", CPU_IMAGE).stdout
    docker("image", "rm", CPU_IMAGE)
    assert not has_image(CPU_IMAGE)
    try:
        # Docker's own socket is a file, which it reaches there too.
        alone = ["unshare", "--net"] if os.geteuid() == 0 else []
        with running(folder, *alone) as service:
            assert docker("image", "inspect", "--format", "{{.Id}}", CPU_IMAGE).stdout == before
            service.wait_healthy()
            body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8}
            url = f"{service.url}/v1/completions"
            response = httpx.post(url, json=body, headers=service.headers, timeout=60)
            assert "Paris" in response.json()["choices"][0]["text"]
    finally:
        if not has_image(CPU_IMAGE):  # for the tests behind this one
            docker("load", "--input", folder / f"images/{NAME}.tar.gz", seconds=300)
