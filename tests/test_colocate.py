"""vLLM in the trainer's process: refused with a way out where it cannot be, and under the contract where it can."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import grpo_toolbox
from grpo_toolbox.engines.colocate import ColocateEngine, Colocation
from grpo_toolbox.errors import ConfigError
from served_models import END, served_model
from vllm_server import vllm_python

_IN_VLLMS_PYTHON = """
import sys
sys.path[:0] = sys.argv[1:3]
sys.path.append(sys.argv[3])  # pytest and what else vLLM's environment lacks
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[4:]]))
"""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this environment has vLLM")
def test_without_vllm_in_this_environment_server_mode_is_offered(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"needs vLLM in this environment.*rollout.vllm.mode=server.*toolbox serve"):
        ColocateEngine(served_model(), Colocation(str(tmp_path)), decode=lambda ids, _: "", stop_ids=(END,))


@pytest.mark.slow
def test_the_contract_holds_for_vllm_in_the_trainers_process() -> None:
    python, tests = vllm_python(), Path(__file__).parent
    source, packages = Path(grpo_toolbox.__file__).parents[1], sysconfig.get_paths()["purelib"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", _IN_VLLMS_PYTHON, str(source), str(tests), packages, str(tests / "colocated.py")],
        env={**os.environ, **settings, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
