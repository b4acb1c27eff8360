"""How close sparse decoding stays to full attention: next tokens, and what is hidden in a text.

Everything is measured through decoding steps of one token, because those are what reads sparsely: a
prefill, or any call with several query tokens, attends exactly. All methods at once:

    results = compare(model, tokenizer, ["default", "quest", "streaming"], context=4096)
    print(results.text())

One figure of one configuration:

    reference = full_attention(model, ids, context=6144, steps=1024)
    with swarm_kv.patch(model, config):
        result = perplexity_kl(model, ids, context=6144, steps=1024, reference=reference)
"""

from . import methods, multi_key, single_key, variable_tracking
from .answers import Answer, Answers, ask, mark, retrieval
from .comparison import (
    PERPLEXITY,
    Reference,
    compare,
    measure,
    measure_full,
    scratch_config,
    task_names,
)
from .pass_keys import Passkey, PasskeyCase, passkey
from .predictions import (
    REFERENCE_CHUNK,
    Comparison,
    compare_predictions,
    full_attention,
    kl_divergence,
    perplexity,
    perplexity_kl,
    teacher_forced,
)
from .results import MethodResult, Results
from .session import CacheFactory, Session
from .tasks import TASKS, Riddle, task
from .trial import Question, Trial, make_trial

__all__ = [
    "PERPLEXITY",
    "REFERENCE_CHUNK",
    "TASKS",
    "Answer",
    "Answers",
    "CacheFactory",
    "Comparison",
    "MethodResult",
    "Passkey",
    "PasskeyCase",
    "Question",
    "Reference",
    "Results",
    "Riddle",
    "Session",
    "Trial",
    "ask",
    "compare",
    "compare_predictions",
    "full_attention",
    "kl_divergence",
    "make_trial",
    "mark",
    "measure",
    "measure_full",
    "methods",
    "multi_key",
    "passkey",
    "perplexity",
    "perplexity_kl",
    "retrieval",
    "scratch_config",
    "single_key",
    "task",
    "task_names",
    "teacher_forced",
    "variable_tracking",
]
