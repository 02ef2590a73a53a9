"""What others import of the learner works, and fast, where torch, DeepSpeed and transformers are absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCKED = """
import sys
sys.path.insert(0, {root!r})

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed", "transformers", "vllm", "ray", "peft"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Refuse())
import learner, learner.config, learner.loop, learner.actor, learner.publish, learner.checkpoint
import learner.groups, learner.reward, learner.sft, learner.sft_data, learner.device, learner.metrics
"""


def test_importing_needs_no_heavy_package() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED.format(root=str(ROOT))], check=True, timeout=60)
