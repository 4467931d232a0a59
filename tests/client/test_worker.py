"""What a worker process sees of us: almost nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import proxied
import pytest
import torch

pytestmark = pytest.mark.cold  # how it comes to be activated is the subject


def test_a_scripts_own_modules_data_loaders_forks_and_settings_work_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("protos", "recovery", "replay", "understudy"):
        (tmp_path / f"{name}.py").write_text('OWNER = "the script"\n')
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text('import os\nos.environ["GUEST_SITECUSTOMIZE"] = "ran"\n')
    monkeypatch.setenv("PYTHONPATH", str(site))
    script = tmp_path / "guest.py"
    script.write_text((proxied.WORKLOADS / "guest.py").read_text())
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert "guest done" in ended.output, ended.output[-3000:]


def test_without_proxyrun_nothing_is_activated() -> None:
    from understudy import proxy_client

    boot = Path(str(proxy_client.__file__)).parent / "boot"
    code = "import sys, torch; print('understudy.proxy_client' in sys.modules, torch.cuda.is_available())"
    environment = {name: value for name, value in os.environ.items() if name != "UNDERSTUDY_JOB"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(boot)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", str(torch.cuda.is_available())]


def test_another_pytorch_than_the_one_built_for_is_refused_by_name(tmp_path: Path) -> None:
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "version.py").write_text("__version__ = '2.12.1+cpu'\n")
    (fake / "__init__.py").write_text("from torch import _C\n")
    (fake / "_C.py").write_text("")
    script = tmp_path / "script.py"  # its folder comes first on sys.path
    script.write_text("import torch\n")
    ended = proxied.run([sys.executable, str(script)], folder=tmp_path)
    assert ended.status == 1
    assert re.search(r"built for PyTorch 2\.\d+\.\d+, but this is PyTorch 2\.12\.1\+cpu", ended.output)
