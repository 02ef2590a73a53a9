from __future__ import annotations

import subprocess
import sys

BLOCKED = "torch", "vllm", "transformers", "deepspeed", "ray", "httpx", "gguf"


def test_the_package_imports_without_any_engine() -> None:
    """In a fresh process with every heavy library out of reach."""
    code = (
        f"import sys\nfor name in {BLOCKED!r}: sys.modules[name] = None\n"
        "import rollout, rollout.actor, rollout.engines, rollout.model, rollout.novelty, rollout.staleness\n"
        "import rollout.engines.weights_024, rollout.engines.worker_extension"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_exports_are_few_and_there() -> None:
    import rollout
    import rollout.engines

    for package in (rollout, rollout.engines):
        assert len(package.__all__) <= 8
        assert all(hasattr(package, name) for name in package.__all__)
