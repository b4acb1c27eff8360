"""`import swarm_kv` and its command start without what only models and compilers need."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "accelerate", "matplotlib")
OF_MODELS = ("transformers.modeling_utils", "transformers.masking_utils")


def outcome(program: str) -> Any:
    """What a program prints last, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def imported_by(program: str) -> set[str]:
    return set(outcome(f"{program}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"))


@pytest.mark.parametrize("module", ["swarm_kv", "swarm_kv.cli"])
def test_it_imports_no_compiler_and_no_model(module: str) -> None:
    found = imported_by(f"import {module}")
    assert {"torch", "swarm_kv.cache"} <= found
    assert not found & {*HEAVY, *OF_MODELS} - imported_by("import torch")


def test_what_a_model_needs_would_show() -> None:
    found = imported_by(
        "import swarm_kv\nfrom transformers import AttentionMaskInterface, PreTrainedModel"
    )
    assert {*OF_MODELS, "torch._dynamo"} <= found


KNOWN = """
    import json
    import {first}
    import {second}
    from transformers.{module} import {interface}
    print(json.dumps("swarm_kv" in {interface}()))
"""
INTERFACES = {
    "modeling_utils": "AttentionInterface",
    "masking_utils": "AttentionMaskInterface",
}


@pytest.mark.parametrize("module", INTERFACES)
def test_models_know_the_name_whichever_is_imported_first(module: str) -> None:
    imports = ["swarm_kv", f"transformers.{module}"]
    for first, second in (imports, imports[::-1]):
        names = {"first": first, "second": second, "module": module}
        assert outcome(KNOWN.format(**names, interface=INTERFACES[module]))


def test_an_import_that_fails_may_be_tried_again() -> None:
    assert outcome("""
        import json, sys
        import swarm_kv.once_imported

        calls = []
        swarm_kv.once_imported.once_imported("transformers.masking_utils", calls.append)
        waiting = len(sys.meta_path)
        sys.modules["transformers.cache_utils"] = None  # so that importing it fails
        try:
            import transformers.masking_utils
        except ImportError:
            assert not calls
        del sys.modules["transformers.cache_utils"]
        import transformers.masking_utils
        import transformers.masking_utils as module

        print(json.dumps(calls == [module] and len(sys.meta_path) < waiting))
    """)
