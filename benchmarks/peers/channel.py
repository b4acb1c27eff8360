"""The runner's end of the conversation with the benchmark: a JSON object per line, each way.

Runs in any environment: only the standard library is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Channel:
    """Requests from standard input, answers to the pipe whose number is the only argument.

    Standard output is for libraries, which print there even while they are imported.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(int(sys.argv[1]), "w")

    def requests(self) -> Iterator[dict[str, Any]]:
        """Until the benchmark closes its end, or ends."""
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers, flush=True)
